"""PromptCache: a prefix tree over tokens, whose nodes own KV. Owned by the scheduler; pure and synchronous.

Theory of operation
-------------------
A node stands for a run of tokens that continues its parent's. Its KV is *resident* (cells of the pool), *saved*
(records in host memory), or both. A path from a root spells a prefix; there is one root per scope, so that clients
of different scopes never see each other's entries.

Rule 1. A node without KV has no place in the tree: it is removed, which only happens to a node without children.
Rule 2. A sequence locks the path it runs on (`n_users`), from the node it stands on up to the root. Cells of a
        locked node are never dropped.
Rule 3. Saving is begin -> commit | abort. Between them the node is `busy`: neither its cells nor its records are
        dropped, and its records cannot be matched, because there are none before commit. The room for the records is
        reserved at begin, so the budget holds at every moment. Restoring is the same the other way round.
Rule 4. A node is cut in two where a sequence leaves its run of tokens. The lower part keeps the identity (locks,
        children and tickets stay valid); the upper part is new. A ticket lists its nodes, and the cut adds one.
Rule 5. Least recently used goes first. Using a node is using its ancestors: in the order of use, which is kept as a
        list, every node comes before what it stands on. So one walk from the oldest on finds leaves first, and what
        they bared afterwards, and it never looks at more than it passes.
Rule 6. What can never be restored whole is not saved: a node whose prefix is longer than the budget. So nothing that
        is saved hangs on something that cannot be.

State of a node       cells   records   what may happen
    resident, dirty     x        -      begin_save; dropped only when nothing can be saved now
    resident, clean     x        x      cells dropped at once when room is needed
    saved               -        x      begin_restore; records dropped when the budget is needed
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from itertools import chain, islice

import numpy as np

from llamatrio.kv.cache_counters import GHOST_TOKENS, CacheCounters, Ghosts
from llamatrio.kv.cells import Int32Array, KVCells
from llamatrio.kv.node import (
    Match,
    Node,
    RestoreTicket,
    SaveTicket,
    common_prefix,
    depth_of,
    nodes_below,
    path_up,
)
from llamatrio.kv.packed import PackedKV, Page, UInt8Array


class PromptCache:
    """Prefixes and their KV, over one pool of cells and one byte budget of host memory."""

    def __init__(self, cells: KVCells, record_bytes: int, budget_bytes: int | None) -> None:
        if record_bytes < 1 or (budget_bytes is not None and budget_bytes < 0):
            raise ValueError(f"expected positive sizes, not {record_bytes=} {budget_bytes=}")
        self.record_bytes = record_bytes
        self.budget_bytes = budget_bytes
        """None: no limit. 0: nothing is saved."""
        self.used_bytes = 0
        """Records held, and room reserved for saves under way."""
        self.n_saving = 0
        self.n_entries = 0
        """Prefixes that can be restored: nodes with records."""
        self.counters = CacheCounters()
        self._cells = cells
        self._roots: dict[str, Node] = {}
        self._scopes: dict[Node, str] = {}
        """By root."""
        self._by_use: OrderedDict[Node, None] = OrderedDict()
        """All nodes, the least recently used first (rule 5)."""
        self._resident: OrderedDict[Node, None] = OrderedDict()
        """Those with cells, in the same order: there are no more of them than the pool has cells."""
        self._ghosts = Ghosts()

    # ---------------------------------------------------------------- matching

    def match_prefix(self, scope: str, tokens: Int32Array) -> Match:
        """The longest known prefix of `tokens`. Cuts the last node where the match ends; nothing else changes."""
        node = self.root(scope)
        n = n_resident = 0
        to_restore: list[Node] = []
        while n < len(tokens) and (child := node.children.get(int(tokens[n]))) is not None:
            same = common_prefix(child.tokens, tokens[n:])
            node = child if same == len(child) else self._cut(child, same)
            n += len(node)
            if not node.is_resident:
                to_restore.append(node)
            elif not to_restore:
                n_resident = n
        self._use(node)
        return Match(node, n, n_resident, tuple(to_restore))

    def count_lookup(self, scope: str, tokens: Int32Array, n_known: int, n_restored: int) -> None:
        """Counts a lookup, once per request: a hit with its tokens by origin, or a miss with its reason."""
        if n_known:
            self.counters.hits += 1
            self.counters.hit_tokens_resident += n_known - n_restored
            self.counters.hit_tokens_restored += n_restored
        else:
            self.counters.misses[self._miss_reason(scope, tokens)] += 1

    def _miss_reason(self, scope: str, tokens: Int32Array) -> str:
        if self.budget_bytes == 0:
            return "disabled"
        if self._ghosts.remembers(scope, tokens):
            return "evicted"
        first = int(tokens[0]) if len(tokens) else -1
        if any(first in root.children for other, root in self._roots.items() if other != scope):
            return "other_scope"
        return "no_entry"

    def lock(self, node: Node) -> None:
        """A sequence stands on this node (rule 2)."""
        for step in path_up(node):
            step.n_users += 1

    def unlock(self, node: Node) -> None:
        """Ends a lock."""
        for step in path_up(node):
            assert step.n_users > 0, "a node was unlocked more often than locked"
            step.n_users -= 1

    # ---------------------------------------------------------------- growing

    def extend(self, lane: int, node: Node, p0: int, tokens: Int32Array) -> Node:
        """Adds the tokens that lane's sequence computed beyond `node`, on which it stands with a lock.

        `tokens` are those at positions p0, p0 + 1, ...; node ends at p0. Where the tree knows them already, the
        sequence goes over to the tree's cells and its own become free; where it knows them without cells, it takes
        the sequence's. The lock moves to the node returned, which ends as far as the tree could follow.
        """
        start = node
        while len(tokens):
            child = node.children.get(int(tokens[0]))
            if child is None:
                node = self._add_leaf(node, tokens, self._cells.seq_cells(lane, p0, p0 + len(tokens)))
                break
            if isinstance(child.busy, RestoreTicket):
                break  # its cells are being written; the sequence keeps its own
            same = common_prefix(child.tokens, tokens)
            node = child if same == len(child) else self._cut(child, same)
            self._join(lane, node, p0)
            p0 += same
            tokens = tokens[same:]
        self._use(node)
        self.lock(node)
        self.unlock(start)
        return node

    def _join(self, lane: int, node: Node, p0: int) -> None:
        if node.cells is not None:
            self._cells.seq_swap(lane, p0, node.cells)
        else:
            node.cells = self._cells.seq_cells(lane, p0, p0 + len(node))
            self._cells.hold(node.cells)

    # ---------------------------------------------------------------- saving

    def begin_save(self, node: Node) -> SaveTicket | None:
        """Reserves room for every dirty node on the path to `node`, dropping the oldest records, and pins their cells.

        Of a prefix longer than the budget, what lies within (rule 6). None when there is nothing to save, or when the
        budget cannot take it now: then nothing has changed.
        """
        if self.budget_bytes == 0:
            return None
        dirty = [step for step in reversed(list(path_up(node))) if step.is_dirty and not step.busy]
        nodes = [step for step in dirty if self._can_ever_be_saved(step)]
        self.counters.saves_refused += len(nodes) < len(dirty)
        n = sum(len(step) for step in nodes)
        if n == 0 or not self._make_room(n * self.record_bytes):
            return None
        cells = np.concatenate([step.cells for step in nodes if step.cells is not None])
        self._cells.pin(cells)
        ticket = SaveTicket(nodes, cells, depth_of(node), n * self.record_bytes)
        self.used_bytes += ticket.reserved_bytes
        self.n_saving += 1
        for step in nodes:
            step.busy = ticket
        return ticket

    def begin_save_oldest(self) -> SaveTicket | None:
        """Begins to save the idle dirty node that was used longest ago, so that its cells can be dropped."""
        if self.budget_bytes == 0:
            return None
        for node in self._resident:
            if node.is_dirty and not (node.n_users or node.busy) and self._can_ever_be_saved(node):
                return self.begin_save(node)
        return None

    def _can_ever_be_saved(self, node: Node) -> bool:
        return self.budget_bytes is None or depth_of(node) * self.record_bytes <= self.budget_bytes

    def unpin_save(self, ticket: SaveTicket) -> None:
        """The cells' bytes have been read. Idempotent."""
        if ticket.is_pinned:
            ticket.is_pinned = False
            self._cells.unpin(ticket.cells)

    def commit_save(self, ticket: SaveTicket, pages: Sequence[UInt8Array]) -> None:
        """Publishes the records ([n, record_bytes] each, together those of ticket.cells): from now on they match."""
        records = PackedKV.from_pages(pages)
        assert len(records) == len(ticket.cells)
        self._end_save(ticket)
        for node in ticket.nodes:
            node.records, records = records.split(len(node))
            self.used_bytes += node.records.acquire()
        self.n_entries += len(ticket.nodes)
        self.counters.saves += 1
        self.counters.save_bytes += ticket.reserved_bytes

    def abort_save(self, ticket: SaveTicket) -> None:
        """Gives the reserved room back; the nodes are dirty as before."""
        self._end_save(ticket)
        self.counters.saves_aborted += 1

    def _end_save(self, ticket: SaveTicket) -> None:
        self.unpin_save(ticket)
        self.used_bytes -= ticket.reserved_bytes
        self.n_saving -= 1
        for node in ticket.nodes:
            assert node.busy is ticket
            node.busy = None

    # ---------------------------------------------------------------- restoring

    def begin_restore(self, nodes: Sequence[Node]) -> RestoreTicket:
        """Takes free cells for the records of these nodes, which are saved, not resident and not busy.

        Raises:
            ValueError: too few cells are free; nothing has changed.
        """
        records = tuple(node.records for node in nodes if node.records is not None and not node.busy)
        assert len(records) == len(nodes)
        ticket = RestoreTicket(list(nodes), self._cells.alloc(sum(len(node) for node in nodes)), records)
        for node in nodes:
            node.busy = ticket
        return ticket

    def commit_restore(self, ticket: RestoreTicket) -> None:
        """The records are in the cells: the nodes are resident, and own the cells."""
        cells = ticket.cells
        for node in ticket.nodes:
            node.busy = None
            node.cells, cells = cells[: len(node)].copy(), cells[len(node) :]
        self._use(ticket.nodes[-1])
        self.counters.restores += 1
        self.counters.restore_bytes += len(ticket.cells) * self.record_bytes

    def abort_restore(self, ticket: RestoreTicket, *, forget: bool) -> None:
        """Gives the cells back. `forget`: the records could not be read, so they go, and with them what needs them."""
        self._cells.drop(ticket.cells)
        for node in ticket.nodes:
            node.busy = None
        if forget:
            self.counters.misses["failed_restore"] += 1
            for node in reversed(ticket.nodes):
                self._forget(node)

    def _forget(self, node: Node) -> None:
        """Drops the records of a node and all below it, as far as nobody needs them."""
        for step in reversed(list(nodes_below([node]))):
            if step.records is not None and self._can_drop_records(step):
                self._drop_records(step)

    # ---------------------------------------------------------------- giving up

    def drop_cells(self, n: int) -> int:
        """Frees at least n cells of idle nodes that lose nothing by it, oldest first; returns how many were freed."""
        return self._drop_cells(n, dirty=False)

    def drop_dirty_cells(self, n: int) -> int:
        """Frees at least n cells of idle nodes that are not saved and carry nothing; returns how many were freed.

        What they hold is lost: for when there is nothing left to save, or no room for it.
        """
        return self._drop_cells(n, dirty=True)

    def _drop_cells(self, n: int, *, dirty: bool) -> int:
        before = self._cells.n_free
        for node in list(self._resident):
            if self._cells.n_free - before >= n:
                break
            if node.n_users or node.busy or node.is_dirty != dirty or (dirty and node.children):
                continue
            assert node.cells is not None
            self._cells.drop(node.cells)
            node.cells = None
            del self._resident[node]
            self._remove_if_empty(node)
        return self._cells.n_free - before

    def _make_room(self, n_bytes: int) -> bool:
        """Drops records, oldest first, until n_bytes more fit into the budget; none where that cannot be reached."""
        victims = self._oldest_records(n_bytes)
        for node in victims or ():
            self._drop_records(node)
        return victims is not None

    def _oldest_records(self, n_bytes: int) -> list[Node] | None:
        """The nodes that give up their records, in order, so that n_bytes more fit; None: all would not be enough."""
        if self.budget_bytes is None:
            return []
        missing = self.used_bytes + n_bytes - self.budget_bytes
        victims: list[Node] = []
        gone: set[Node] = set()
        users: dict[Page, int] = {}
        for node in self._by_use:
            if missing <= 0:
                break
            if node.records is None or not self._can_drop_records(node, gone):
                continue
            victims.append(node)
            if not node.is_resident:
                gone.add(node)
            for page in node.records.pages():
                users[page] = users.get(page, page.n_users) - 1
                missing -= page.nbytes if users[page] == 0 else 0
        return victims if missing <= 0 else None

    def _can_drop_records(self, node: Node, gone: Container[Node] = ()) -> bool:
        """Nothing that hangs on the node, but what is `gone` by then, may be left without its prefix (rule 1)."""
        if node.busy or node.is_resident:
            return not node.busy
        return not node.n_users and all(child in gone for child in node.children.values())

    def _drop_records(self, node: Node) -> None:
        assert node.records is not None
        freed = node.records.release()
        node.records = None
        self.n_entries -= 1
        self.used_bytes -= freed
        self.counters.evicted_bytes += freed
        self._remove_if_empty(node)

    def _remove_if_empty(self, node: Node) -> None:
        if node.cells is None and node.records is None and not node.children and node.parent is not None:
            assert not node.n_users
            self._remember(node)
            del self._by_use[node]
            del node.parent.children[int(node.tokens[0])]

    def _remember(self, node: Node) -> None:
        """A prefix has been evicted: the next miss can say so."""
        path = list(path_up(node))
        root = path[-1].parent
        assert root is not None
        tokens = chain.from_iterable(step.tokens for step in reversed(path))
        self._ghosts.add(self._scopes[root], np.fromiter(islice(tokens, GHOST_TOKENS), np.int32))

    # ---------------------------------------------------------------- looking

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        return nodes_below(child for root in self._roots.values() for child in root.children.values())

    @property
    def n_idle_cells(self) -> int:
        """Cells of nodes that no sequence stands on."""
        return sum(len(node) for node in self._resident if not node.n_users)

    def path(self, node: Node, n_tokens: int) -> list[Node]:
        """The nodes from the root to `node` that spell its first n_tokens tokens, which end with one of them."""
        nodes: list[Node] = []
        for step in reversed(list(path_up(node))):
            if n_tokens <= 0:
                break
            nodes.append(step)
            n_tokens -= len(step)
        assert n_tokens == 0
        return nodes

    def depth(self, node: Node) -> int:
        """Tokens from the root to the end of `node`."""
        return depth_of(node)

    def check_invariants(self) -> None:
        """Asserts the rules, and that the books of bytes agree with what is held."""
        pages = {id(s.page): s.page for node in self.nodes() if node.records for s in node.records.slices}
        saves = {id(n.busy): n.busy for n in self.nodes() if isinstance(n.busy, SaveTicket)}
        reserved = sum(ticket.reserved_bytes for ticket in saves.values())
        assert self.used_bytes == sum(page.nbytes for page in pages.values()) + reserved
        assert self.budget_bytes is None or self.used_bytes <= self.budget_bytes
        assert self.n_saving == len(saves)
        assert self.n_entries == sum(node.records is not None for node in self.nodes())
        assert set(self._by_use) == set(self.nodes())
        assert list(self._resident) == [node for node in self._by_use if node.is_resident]
        place = {node: i for i, node in enumerate(self._by_use)}
        for node in self.nodes():
            assert node.parent is not None
            assert len(node) > 0
            assert node.parent.children[int(node.tokens[0])] is node
            assert node.cells is not None or node.records is not None
            assert node.n_users >= sum(child.n_users for child in node.children.values())
            assert node.parent.parent is None or place[node] < place[node.parent]
            assert node.cells is None or len(node.cells) == len(node)
            assert node.records is None or len(node.records) == len(node)

    def held_cells(self) -> list[Int32Array]:
        """The cell arrays that nodes, restores and pins hold: for KVCells.check_invariants."""
        held = [node.cells for node in self.nodes() if node.cells is not None]
        tickets = {id(node.busy): node.busy for node in self.nodes() if node.busy}
        held += [t.cells for t in tickets.values() if isinstance(t, RestoreTicket) or t.is_pinned]
        return held

    # ---------------------------------------------------------------- the tree

    def root(self, scope: str) -> Node:
        """The empty prefix of a scope."""
        if (root := self._roots.get(scope)) is None:
            root = self._roots[scope] = Node(np.empty(0, np.int32), None)
            self._scopes[root] = scope
        return root

    def _use(self, node: Node) -> None:
        """The node and what it stands on are the most recently used ones (rule 5)."""
        for step in path_up(node):
            self._by_use[step] = None
            self._by_use.move_to_end(step)
            if step.is_resident:
                self._resident[step] = None
                self._resident.move_to_end(step)

    def _add_leaf(self, parent: Node, tokens: Int32Array, cells: Int32Array) -> Node:
        node = Node(tokens.copy(), parent)
        node.cells = cells
        self._cells.hold(cells)
        parent.children[int(tokens[0])] = node
        return node

    def _cut(self, node: Node, n: int) -> Node:
        """Cuts a node after its first n tokens and returns the new upper part (rule 4), which the caller uses."""
        assert node.parent is not None
        assert 0 < n < len(node)
        upper = Node(node.tokens[:n].copy(), node.parent)
        upper.n_users = node.n_users
        upper.children = {int(node.tokens[n]): node}
        node.parent.children[int(node.tokens[0])] = upper
        node.parent = upper
        node.tokens = node.tokens[n:].copy()
        if node.cells is not None:
            upper.cells, node.cells = node.cells[:n].copy(), node.cells[n:].copy()
        if node.records is not None:
            whole = node.records
            upper.records, node.records = whole.split(n)
            upper.records.acquire()
            node.records.acquire()
            whole.release()
            self.n_entries += 1
        if node.busy is not None:
            upper.busy = node.busy
            at = node.busy.nodes.index(node)
            node.busy.nodes.insert(at, upper)
        return upper
