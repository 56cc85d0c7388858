"""What the prompt cache counts, and the memory of what was evicted that lets a miss say why."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from llamatrio.kv.cells import Int32Array

N_GHOSTS = 4096
"""How many evicted prefixes are remembered."""
GHOST_TOKENS = 16
"""A prefix is remembered by its first tokens."""


@dataclass(slots=True)
class CacheCounters:
    """What has happened since the start; counters never fall."""

    hits: int = 0
    hit_tokens_resident: int = 0
    hit_tokens_restored: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    """By reason: no_entry, evicted, other_scope, disabled, failed_restore."""
    saves: int = 0
    save_bytes: int = 0
    saves_aborted: int = 0
    saves_refused: int = 0
    restores: int = 0
    restore_bytes: int = 0
    evicted_bytes: int = 0


class Ghosts:
    """Prefixes that were evicted, the most recent N_GHOSTS of them."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def add(self, scope: str, tokens: Int32Array) -> None:
        """Remembers a prefix of a scope."""
        self._seen[scope, tokens[:GHOST_TOKENS].tobytes()] = None
        if len(self._seen) > N_GHOSTS:
            self._seen.popitem(last=False)

    def remembers(self, scope: str, tokens: Int32Array) -> bool:
        """Whether a prefix that began like this was evicted."""
        return (scope, tokens[:GHOST_TOKENS].tobytes()) in self._seen
