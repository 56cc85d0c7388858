"""One thin launcher per kernel of `cuda_src`, of the kernel's name.

Every launcher takes a `Launcher` first, then device addresses in the kernel's own order, then sizes by keyword. It
checks what would be a misuse (ValueError), picks variant, grid and block, and enqueues: it never waits or allocates.
Addresses lie on 16 bytes. Exact argument orders, index maps and bytes moved stand at the top of each `.cu` file.

A step, layer by layer (x is the residual stream, f32; "| f16" is the form for prompt rows):

    embed_rows                                     tokens -> x
    rms_norm (x += the sublayer before; -> q8 | f16)
      matmul_rows | matmul_tile                    -> qkv, side by side (out_stride), biases added
      rope_store                                   head norms, rope; Q in place, K and V into cells
      attention_decode | attention_prefill         -> f32
      convert_rows                                 -> q8 | f16
      matmul_rows | matmul_tile                    -> delta
    post_norm                                      gemma only: x += norm(delta), and no delta goes on
    rms_norm (x += delta; -> q8 | f16)
      matmul_rows | matmul_tile                    gate and up -> both
      glu                                          -> q8 | f16
      matmul_rows | matmul_tile                    -> delta
    take_rows, rms_norm, matmul_rows, top_k        the rows whose logits are wanted

Experts in place of the feed-forward: matmul_float (the router), moe_route, then matmul_expert_rows, or moe_plan and
matmul_expert_tile, for gate, up (share = n_used) and down (share = 1), moe_sum.

What the host has to keep:
 * A row's path (left or right of the bar) follows from Run.is_decode, not from how many rows there are; a launcher's
   choice among variants never changes a row's numbers. F16, BF16 and F32 weights take matmul_float for decode rows,
   from f32 (`decode_kind`).
 * Arrays that change from step to step stay at their addresses, so that a captured graph may be replayed. Rows of
   padding have position -1 and cell -1, in embed_rows token -1; they write no cell, and their results mean nothing.
 * The KV pool is set to zeros once: a q8_0 row's padding is gathered with it, but never written.
 * k (a matrix's inner size) is a multiple of 32, and of 256 for K-quants and IQ4_XS; head_dim of 32 (64, 96, 128 and
   256 are what models have). What does not fit is an UnsupportedModelError of the host's.
"""
