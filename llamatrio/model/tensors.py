"""The tensors that a model has, and the check that a file has them."""

from __future__ import annotations

from llamatrio.errors import GGUFError, UnsupportedModelError
from llamatrio.model.families import FAMILIES
from llamatrio.model.gguf import GGUFFile, TensorInfo
from llamatrio.model.quants import can_dequantize
from llamatrio.model.rope import FREQS_NAME, LONG_FACTORS_NAME, SHORT_FACTORS_NAME
from llamatrio.model.spec import ModelSpec

Shapes = dict[str, tuple[int, ...]]


def check_tensors(file: GGUFFile, spec: ModelSpec) -> None:
    """Every tensor that the spec needs is there, in its shape and in a type we can read, and no other is.

    Raises:
        GGUFError: a tensor is missing, or has another shape.
        UnsupportedModelError: a tensor has a type that we cannot read, or nobody knows what it is for.
    """
    expected = tensor_shapes(spec)
    for name, shape in expected.items():
        tensor = file.tensors.get(name)
        if tensor is None:
            raise GGUFError(f"the file has no tensor {name!r}")
        if tensor.shape != shape:
            raise GGUFError(f"tensor {name!r} has the shape {list(tensor.shape)}, not {list(shape)}")
        if not can_dequantize(tensor.type):
            raise UnsupportedModelError(f"tensor {name!r} has the type {tensor.type.name}, which is not supported")
    for name, tensor in file.tensors.items():
        if name == FREQS_NAME:
            _check_factors(name, tensor, spec)
        elif name not in expected:
            raise UnsupportedModelError(f"tensor {name!r} is not known in the architecture {spec.arch!r}")


def _check_factors(name: str, tensor: TensorInfo, spec: ModelSpec) -> None:
    if tensor.shape != (spec.rope.n_dims // 2,) or not can_dequantize(tensor.type):
        raise GGUFError(f"tensor {name!r} is not {spec.rope.n_dims // 2} numbers")


def tensor_shapes(spec: ModelSpec) -> Shapes:
    """Names and shapes (NumPy order: [outputs, inputs]) of the tensors of a model.

    `rope_freqs.weight`, float32 [rope.n_dims / 2], may come in addition.
    """
    shapes: Shapes = {"token_embd.weight": (spec.n_vocab, spec.n_embd), "output_norm.weight": (spec.n_embd,)}
    if not spec.tied_head:
        shapes["output.weight"] = (spec.n_vocab, spec.n_embd)
    if spec.rope.has_long_factors:
        shapes |= dict.fromkeys((SHORT_FACTORS_NAME, LONG_FACTORS_NAME), (spec.rope.n_dims // 2,))
    layer_shapes = _norms(spec) | _attention(spec) | (_experts(spec) if spec.n_expert else _dense(spec))
    for layer in range(spec.n_layer):
        shapes.update({f"blk.{layer}.{name}": shape for name, shape in layer_shapes.items()})
    return shapes


def _norms(spec: ModelSpec) -> Shapes:
    shapes: Shapes = {"attn_norm.weight": (spec.n_embd,), f"{FAMILIES[spec.arch].ffn_norm}.weight": (spec.n_embd,)}
    if spec.has_qk_norm:
        shapes |= {"attn_q_norm.weight": (spec.head_dim,), "attn_k_norm.weight": (spec.head_dim,)}
    if spec.has_post_norm:
        shapes |= {"post_attention_norm.weight": (spec.n_embd,), "post_ffw_norm.weight": (spec.n_embd,)}
    return shapes


def _attention(spec: ModelSpec) -> Shapes:
    n_q, n_kv = spec.n_head * spec.head_dim, spec.n_head_kv * spec.head_dim
    widths = {"attn_qkv": n_q + 2 * n_kv} if spec.is_qkv_fused else {"attn_q": n_q, "attn_k": n_kv, "attn_v": n_kv}
    shapes: Shapes = {f"{name}.weight": (width, spec.n_embd) for name, width in widths.items()}
    shapes["attn_output.weight"] = (spec.n_embd, n_q)
    if spec.has_qkv_bias:
        shapes |= {f"{name}.bias": (width,) for name, width in widths.items()}
    if spec.has_all_biases:
        shapes["attn_output.bias"] = (spec.n_embd,)
    if spec.has_sinks:
        shapes["attn_sinks.weight"] = (spec.n_head,)
    return shapes


def _dense(spec: ModelSpec) -> Shapes:
    gate_up = {"ffn_up": 2 * spec.n_ff} if spec.is_gate_up_fused else {"ffn_gate": spec.n_ff, "ffn_up": spec.n_ff}
    shapes: Shapes = {f"{name}.weight": (width, spec.n_embd) for name, width in gate_up.items()}
    return shapes | {"ffn_down.weight": (spec.n_embd, spec.n_ff)}


def _experts(spec: ModelSpec) -> Shapes:
    n, n_embd, n_ff = spec.n_expert, spec.n_embd, spec.n_ff
    shapes: Shapes = {
        "ffn_gate_inp.weight": (n, n_embd),
        "ffn_gate_exps.weight": (n, n_ff, n_embd),
        "ffn_up_exps.weight": (n, n_ff, n_embd),
        "ffn_down_exps.weight": (n, n_embd, n_ff),
    }
    if spec.has_all_biases:
        shapes |= {name.replace(".weight", ".bias"): shape[:-1] for name, shape in shapes.items()}
    return shapes
