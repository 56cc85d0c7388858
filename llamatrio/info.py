"""`llamatrio info`: what a file holds, and the memory that serving it takes."""

from __future__ import annotations

from collections import Counter

from llamatrio.backends.cpu.cells import kv_layout
from llamatrio.backends.cpu.weights import sketch_bytes
from llamatrio.config import MIB
from llamatrio.model.model import Model
from llamatrio.model.spec import KVType


def describe(model: Model, *, n_ctx: int = 0, list_tensors: bool = False) -> str:
    """A few lines of text; with n_ctx 0 the memory is that of the model's own training context."""
    spec, tokenizer = model.spec, model.tokenizer
    types = Counter(tensor.type.name for tensor in model.file.tensors.values())
    n_ctx = n_ctx or spec.n_ctx_train
    experts = f", {spec.n_expert} experts ({spec.n_expert_used} used)" if spec.n_expert else ""
    window = f", window {spec.window} on {sum(spec.windowed)} layers" if spec.window else ""
    lines = [
        f"file          {model.path}",
        f"name          {spec.name or model.name}",
        f"architecture  {spec.arch}, {spec.n_layer} layers, {spec.n_embd} wide, {spec.n_head} heads "
        f"({spec.n_head_kv} KV) of {spec.head_dim}{experts}{window}",
        f"parameters    {model.n_params / 1e6:.1f} M in {model.size_bytes / MIB:.1f} MiB "
        f"({', '.join(f'{n} {name}' for name, n in types.most_common())})",
        f"context       {spec.n_ctx_train} tokens in training",
        f"vocabulary    {tokenizer.n_vocab} tokens, ends at {sorted(tokenizer.eog_ids)}",
        f"chat template {'ChatML (none in the file)' if model.chat_template.is_default else 'in the file'}",
    ]
    lines += [_memory(model, n_ctx, kv_type) for kv_type in ("f16", "q8_0")]
    if list_tensors:
        lines += [f"  {t.name:40} {t.type.name:6} {list(t.shape)}" for t in model.file.tensors.values()]
    return "\n".join(lines)


def _memory(model: Model, n_ctx: int, kv_type: KVType) -> str:
    try:
        cell = kv_layout(model.spec, kv_type, kv_type).record_bytes
    except ValueError as error:
        return f"memory        {kv_type} KV: {error}"
    kv, sketch = cell * n_ctx, sketch_bytes(model.file, model.spec)
    beside = f"; on the CPU, {sketch / MIB:.0f} MiB for a sketch of the head" if sketch else ""
    return (
        f"memory        {(model.size_bytes + kv + sketch) / MIB:.0f} MiB at {n_ctx} tokens with {kv_type} KV "
        f"({cell} bytes a token, {kv / MIB:.0f} MiB{beside})"
    )
