"""The prefix tree's nodes, and the values that the prompt cache hands out about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from llamatrio.kv.cells import Int32Array
from llamatrio.kv.packed import PackedKV


class Node:
    """A run of tokens in the tree, and its KV."""

    __slots__ = ("busy", "cells", "children", "n_users", "parent", "records", "tokens")

    def __init__(self, tokens: Int32Array, parent: Node | None) -> None:
        self.tokens = tokens
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.cells: Int32Array | None = None
        self.records: PackedKV | None = None
        self.n_users = 0
        self.busy: SaveTicket | RestoreTicket | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_resident(self) -> bool:
        """Its KV is in cells of the pool."""
        return self.cells is not None

    @property
    def is_dirty(self) -> bool:
        """Its KV is in cells only."""
        return self.cells is not None and self.records is None


class Match(NamedTuple):
    """The longest known prefix of a prompt."""

    node: Node
    """Where the prefix ends; the scope's root when nothing matched."""
    n_tokens: int
    n_resident: int
    """Tokens of the path before the first node that is not resident."""
    to_restore: tuple[Node, ...]
    """Nodes of the path that are not resident, from the root on."""


@dataclass(slots=True, eq=False)
class SaveTicket:
    """The right to publish the records of some nodes. Ends by commit_save or abort_save, exactly once."""

    nodes: list[Node]
    cells: Int32Array
    """[n] pinned until unpin_save; their records are what commit_save wants, in this order."""
    n_prefix: int
    """Tokens of the whole prefix that becomes restorable."""
    reserved_bytes: int
    is_pinned: bool = True


@dataclass(slots=True, eq=False)
class RestoreTicket:
    """The right to make some nodes resident again. Ends by commit_restore or abort_restore, exactly once."""

    nodes: list[Node]
    cells: Int32Array
    """[n] taken from the pool for the nodes' records, in this order."""
    records: tuple[PackedKV, ...]


def path_up(node: Node) -> Iterator[Node]:
    """The node and its ancestors, the root left out."""
    while node.parent is not None:
        yield node
        node = node.parent


def nodes_below(nodes: Iterable[Node]) -> Iterator[Node]:
    """These nodes and all that hang on them, parents before children."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def depth_of(node: Node) -> int:
    """Tokens from the root to the end of the node."""
    return sum(len(step) for step in path_up(node))


def common_prefix(a: Int32Array, b: Int32Array) -> int:
    """How many tokens two runs begin with alike."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n
