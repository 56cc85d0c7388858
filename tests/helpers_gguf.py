"""Writes GGUF files for tests: any metadata and tensors, and small models that are valid in every part."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray

from llamatrio.model.bpe import byte_alphabet
from llamatrio.model.gguf import GGMLType

N_VOCAB = 288
MERGES = ["t h", "th e", "i n", "Ġ a", "e r", "Ġ the", "o n", "Ġ t"]
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

_ARRAY_TYPES = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12}


class RawTensor(NamedTuple):
    """A tensor given as the bytes of its blocks."""

    type: int
    shape: tuple[int, ...]
    raw: bytes


Tensor = NDArray[Any] | RawTensor


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    version: int = 3,
    pads_the_end: bool = True,
) -> Path:
    """Writes a GGUF file and returns its path.

    Metadata: bool, int (u32, or i64 when it does not fit), float (f32), str, list of str, NumPy array or scalar
    (keeps its type). Tensors: float32 or float16 arrays, or RawTensor.
    """
    alignment = int(metadata.get("general.alignment", 32))
    head = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    for key, value in metadata.items():
        head += [_string(key), _value(value)]
    data = bytearray()
    for name, tensor in tensors.items():
        data += bytes(-len(data) % alignment)
        raw = _raw(tensor)
        head.append(_string(name) + struct.pack("<I", len(raw.shape)))
        head.append(struct.pack(f"<{len(raw.shape)}QIQ", *raw.shape[::-1], raw.type, len(data)))
        data += raw.raw
    header = b"".join(head)
    tail = -len(data) % alignment if pads_the_end else 0
    path.write_bytes(header + bytes(-len(header) % alignment) + data + bytes(tail))
    return path


def tiny_vocabulary() -> dict[str, Any]:
    """Tokenizer metadata: 256 bytes, a few merges, three control tokens, and unused ones up to N_VOCAB."""
    texts = [*byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES), *CONTROL_TOKENS]
    kinds = [1] * (len(texts) - len(CONTROL_TOKENS)) + [3] * len(CONTROL_TOKENS)
    n_unused = N_VOCAB - len(texts)
    texts += [f"<unused{i}>" for i in range(n_unused)]
    kinds += [5] * n_unused
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": texts.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": texts.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
    }


def spm_vocabulary(words: Mapping[str, float], *, n_vocab: int | None = None, **keys: Any) -> dict[str, Any]:
    """Tokenizer metadata of a SentencePiece vocabulary: <unk>, <s>, </s>, 256 bytes, then `words` and scores."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    scores = [0.0] * (3 + 256) + list(words.values())
    for i in range((n_vocab or len(texts)) - len(texts)):
        texts.append(f"<unused{i}>")
        kinds.append(5)
        scores.append(-1000.0)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def tiny_model(
    path: Path,
    arch: str = "llama",
    *,
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 32,
    n_ff: int = 96,
    n_ctx: int = 512,
    window: int = 16,
    tied_head: bool = True,
    type: GGMLType = GGMLType.F16,
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes a small random model of `arch` that loads and runs; returns `path`.

    `arch` is llama, qwen2, qwen3, phi3, gemma2 or gemma3; `type` that of the matrices. `metadata` and `tensors` add to
    the file's own or replace them; a None removes.
    """
    has_vocabulary = "tokenizer.ggml.tokens" in (metadata or {})
    keys: dict[str, Any] = {
        "general.architecture": arch,
        "general.name": f"tiny {arch}",
        f"{arch}.context_length": n_ctx,
        f"{arch}.embedding_length": n_embd,
        f"{arch}.block_count": n_layer,
        f"{arch}.feed_forward_length": n_ff,
        f"{arch}.attention.head_count": n_head,
        f"{arch}.attention.head_count_kv": n_head_kv,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.rope.dimension_count": head_dim,
        **({} if has_vocabulary else tiny_vocabulary()),
        **({f"{arch}.attention.sliding_window": window} if arch in ("gemma2", "gemma3") else {}),
        **(metadata or {}),
    }
    n_vocab = len(keys["tokenizer.ggml.tokens"])
    shapes = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)}
    if not tied_head:
        shapes["output.weight"] = (n_vocab, n_embd)
    for layer in range(n_layer):
        for name, shape in _layer_shapes(arch, n_embd, n_head * head_dim, n_head_kv * head_dim, head_dim, n_ff).items():
            shapes[f"blk.{layer}.{name}"] = shape
    rng = np.random.default_rng(seed)
    made: dict[str, Tensor | None] = {name: _random_tensor(rng, name, shape, type) for name, shape in shapes.items()}
    made.update(tensors or {})
    return write_gguf(
        path,
        {key: value for key, value in keys.items() if value is not None},
        {name: tensor for name, tensor in made.items() if tensor is not None},
    )


def _layer_shapes(arch: str, n_embd: int, n_q: int, n_kv: int, head_dim: int, n_ff: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (n_embd,),
        "attn_q.weight": (n_q, n_embd),
        "attn_k.weight": (n_kv, n_embd),
        "attn_v.weight": (n_kv, n_embd),
        "attn_output.weight": (n_embd, n_q),
        "ffn_norm.weight": (n_embd,),
        "ffn_gate.weight": (n_ff, n_embd),
        "ffn_up.weight": (n_ff, n_embd),
        "ffn_down.weight": (n_embd, n_ff),
    }
    if arch == "qwen2":
        shapes |= {"attn_q.bias": (n_q,), "attn_k.bias": (n_kv,), "attn_v.bias": (n_kv,)}
    if arch in ("qwen3", "gemma3"):
        shapes |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    if arch == "phi3":
        del shapes["attn_q.weight"], shapes["attn_k.weight"], shapes["attn_v.weight"], shapes["ffn_gate.weight"]
        shapes |= {"attn_qkv.weight": (n_q + 2 * n_kv, n_embd), "ffn_up.weight": (2 * n_ff, n_embd)}
    if arch in ("gemma2", "gemma3"):
        shapes |= {"post_attention_norm.weight": (n_embd,), "post_ffw_norm.weight": (n_embd,)}
    return shapes


def _random_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...], type: GGMLType) -> Tensor:
    values = rng.standard_normal(shape).astype(np.float32)
    if "norm" in name:
        return 1 + 0.1 * values
    if len(shape) == 1:
        return 0.1 * values
    values *= 1.0 if name == "token_embd.weight" else shape[1] ** -0.5
    if type == GGMLType.F32:
        return values
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType(int(type)))
    return RawTensor(int(type), shape, raw.tobytes())


def _raw(tensor: Tensor) -> RawTensor:
    if isinstance(tensor, RawTensor):
        return tensor
    kind = {"f4": GGMLType.F32, "f2": GGMLType.F16}[tensor.dtype.str[1:]]
    return RawTensor(int(kind), tensor.shape, np.ascontiguousarray(tensor).tobytes())


def _string(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value) if 0 <= value < 1 << 32 else struct.pack("<Iq", 11, value)
    if isinstance(value, float) and not isinstance(value, np.generic):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    kind = _ARRAY_TYPES[value.dtype.str[1:]]
    if value.ndim == 0:
        return struct.pack("<I", kind) + value.tobytes()
    return struct.pack("<IIQ", 9, kind, len(value)) + value.tobytes()
