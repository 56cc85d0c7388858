"""The tables of numbers that the compiled step runs on.

One compiled step serves every architecture and type: what differs between models is data here. Addresses are
absolute, sizes in bytes unless the name says otherwise, f32 parameters are passed as their bits (`ops.f32_bits`),
and 0 stands for "this model has none".

    step      int64 [N_STEP]                   dimensions, kernels, buffers, and the work of one step
    layers    int64 [n_layer, N_LAYER]         one row per layer
    matrices  int64 [n_layer * 7 + 1, N_MATRIX] Q .. DOWN of each layer, then the head
    batches   int64 [n, N_BATCH]               how the heads of a group are split over attention kernels
"""

from __future__ import annotations

# Columns of `layers`.
(
    ATTN_NORM,
    Q_BIAS,
    K_BIAS,
    V_BIAS,
    Q_NORM,
    K_NORM,
    POST_ATTN_NORM,
    FFN_NORM,
    POST_FFN_NORM,
    K_POOL,
    V_POOL,
    ROPE_TABLE,
    WINDOW,
    N_LAYER_FIELDS,
) = range(14)

# Rows of `matrices` within a layer.
Q, K, V, O, GATE, UP, DOWN, N_LAYER_MATRICES = range(8)  # noqa: E741 - as the literature calls them

# Columns of `matrices`.
M_ADDRESS, M_GROUPS, M_K, M_ROWS_KERNEL, M_PANEL_KERNEL, M_TAKES_Q8, N_MATRIX_FIELDS = range(7)

# Columns of `batches`.
B_KERNEL, B_FIRST_HEAD, B_HEADS, N_BATCH_FIELDS = range(4)

# Elements of `step`.
(
    TEAM,
    # the model
    N_LAYER,
    N_EMBD,
    N_FF,
    N_HEAD,
    N_HEAD_KV,
    HEAD_DIM,
    N_ROT,
    N_VOCAB,
    N_LOGITS,
    HAS_POST_NORM,
    EPS,
    EMBD_SCALE,
    ATTN_SCALE,
    ATTN_CAP,
    FINAL_CAP,
    # the cache
    K_STRIDE,
    V_STRIDE,
    K_IS_Q8,
    V_IS_Q8,
    QUERY_BYTES,
    STATE_BYTES,
    # kernels
    F_EMBED,
    F_SCALE,
    F_ADD,
    F_COPY,
    F_NORM,
    F_NORM_ADD,
    F_ROPE,
    F_HADAMARD,
    F_STORE_K,
    F_STORE_V,
    F_QUANTIZE_QUERY,
    F_MERGE,
    F_FINISH,
    F_FLASH_BEGIN,
    F_FLASH_PACK,
    F_FLASH_CHUNK,
    F_FLASH_FINISH,
    F_GATE,
    F_QUANTIZE,
    F_BF16,
    F_SOFT_CAP,
    F_SCAN,
    F_SKETCH,
    F_LENGTHS,
    F_MAXIMA,
    F_SCORE,
    # shared buffers
    EMBEDDING,
    OUTPUT_NORM,
    X_SHARED,
    QKV,
    LD_QKV,
    QUERIES,
    STATES,
    ATTN_OUT,
    LAYER_OUT,
    LD_LAYER_OUT,
    GATES,
    UPS,
    HIDDEN_Q8,
    HIDDEN_BF16,
    INPUT_Q8,
    INPUT_F32,
    INPUT_BF16,
    HEAD_Q8,
    HEAD_F32,
    LOGITS,
    LD_LOGITS,
    HEAD_ROWS,
    MAXIMA,
    SEGMENTS,
    SKETCH,
    THRESHOLDS,
    N_SCORED,
    # private buffers: member i's starts at i * PRIVATE_BYTES
    PRIVATE_BYTES,
    X_PRIVATE,
    INPUT_Q8_PRIVATE,
    INPUT_F32_PRIVATE,
    ROW_SCRATCH,
    STATE_SCRATCH,
    ATTN_SCRATCH,
    PANEL_SCRATCH,
    GATE_SLICE,
    UP_SLICE,
    FLASH_QUERIES,
    FLASH_PACKED,
    FLASH_STATES,
    FLASH_SCORES,
    PROBES,
    PROBE_LOGITS,
    CANDIDATES,
    # one step's work
    N_ROWS,
    N_PANEL,
    N_LONE,
    N_OUT,
    N_TOP,
    BY_SKETCH,
    BY_CHUNKS,
    TOKENS,
    POSITIONS,
    CELLS,
    CELL_LISTS,
    SPANS,
    N_SPANS,
    OUT_ROWS,
    FULL_PLACES,
    FULL_OUT,
    TOP_LOGITS,
    TOP_IDS,
    LOG_SUMS,
    N_STEP_FIELDS,
) = range(112)

MOST_PRIVATE_ROWS = 16
"""Decode rows up to which every member may keep its own copy of the rows (see step.py)."""
