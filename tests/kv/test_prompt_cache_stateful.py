"""PromptCache against a model that is a set of token tuples.

Each cell's "contents" is the prefix it was computed for, so any mix-up of cells, records or prefixes shows at once.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llamatrio.kv.cells import KVCells
from llamatrio.kv.node import Node, RestoreTicket, SaveTicket
from llamatrio.kv.packed import page_sizes
from llamatrio.kv.prompt_cache import PromptCache

RECORD = 8
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)
scopes = st.sampled_from(["", "tenant"])


def fingerprint(scope: str, prefix: tuple[int, ...]) -> int:
    return hash((scope, prefix)) & 0x7FFF_FFFF_FFFF_FFFF


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cells = KVCells(64, 4, 16)
        self.cache = PromptCache(self.cells, RECORD, None)
        self.pool = np.zeros(64, np.uint64)
        self.running: dict[int, tuple[str, tuple[int, ...], Node, int]] = {}
        self.saves: list[tuple[SaveTicket, np.ndarray]] = []
        self.restores: list[RestoreTicket] = []

    @initialize(n_records=st.sampled_from([0, 8, 40, None]))
    def budget(self, n_records: int | None) -> None:
        """Of 8 records: less than some prompts have tokens."""
        self.cache.budget_bytes = None if n_records is None else n_records * RECORD

    def check_path(self, scope: str, tokens: tuple[int, ...], node: Node) -> None:
        """Every cell on the path holds what belongs to its prefix."""
        at = 0
        for step in self.cache.path(node, self.cache.depth(node)):
            for token, index in zip(step.tokens, range(len(step)), strict=True):
                assert tokens[at] == token
                if step.cells is not None:
                    assert self.pool[step.cells[index]] == fingerprint(scope, tokens[: at + 1])
                at += 1

    @precondition(lambda self: len(self.running) < 4)
    @rule(scope=scopes, tokens=prompts)
    def start(self, scope: str, tokens: tuple[int, ...]) -> None:
        lane = next(i for i in range(4) if i not in self.running)
        match = self.cache.match_prefix(scope, np.array(tokens, np.int32))
        self.check_path(scope, tokens, match.node)
        assert match.n_resident <= match.n_tokens <= len(tokens)
        path = self.cache.path(match.node, match.n_tokens)
        resident = []
        for step in path:
            if step.cells is None:
                break
            resident.append(step)
        assert sum(map(len, resident)) == match.n_resident
        if self.cells.n_free < len(tokens) - match.n_resident:
            return
        node = resident[-1] if resident else self.cache.root(scope)
        self.cache.lock(node)
        for step in resident:
            self.cells.seq_share(lane, step.cells)
        new = self.cells.seq_grow(lane, len(tokens) - match.n_resident)
        for p, cell in enumerate(new, start=match.n_resident):
            self.pool[cell] = fingerprint(scope, tokens[: p + 1])
        self.running[lane] = (scope, tokens, node, match.n_resident)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), save=st.booleans())
    def turn_idle(self, data: st.DataObject, save: bool) -> None:
        lane = data.draw(st.sampled_from(sorted(self.running)))
        scope, tokens, node, shared = self.running.pop(lane)
        end = self.cache.extend(lane, node, shared, np.array(tokens[shared:], np.int32))
        self.check_path(scope, tokens, end)
        for p, cell in enumerate(self.cells.seq_cells(lane)):
            assert self.pool[cell] == fingerprint(scope, tokens[: p + 1]), "the sequence went over to a wrong cell"
        self.cells.seq_rm(lane)
        self.cache.unlock(end)
        if save:
            self.begin(self.cache.begin_save(end))

    @rule()
    def save_oldest(self) -> None:
        self.begin(self.cache.begin_save_oldest())

    def begin(self, ticket: SaveTicket | None) -> None:
        if ticket is not None:
            self.saves.append((ticket, self.pool[ticket.cells].copy()))

    @precondition(lambda self: self.saves)
    @rule(data=st.data(), commit=st.booleans())
    def end_save(self, data: st.DataObject, commit: bool) -> None:
        ticket, contents = self.saves.pop(data.draw(st.integers(0, len(self.saves) - 1)))
        assert (self.pool[ticket.cells] == contents).all(), "a pinned cell was overwritten"
        self.cache.unpin_save(ticket)
        if not commit:
            self.cache.abort_save(ticket)
            return
        data8, pages, at = contents.view(np.uint8).reshape(-1, RECORD), [], 0
        for size in page_sizes(len(contents)):
            pages.append(data8[at : at + size].copy())
            at += size
        self.cache.commit_save(ticket, pages)

    @rule(scope=scopes, tokens=prompts)
    def restore(self, scope: str, tokens: tuple[int, ...]) -> None:
        match = self.cache.match_prefix(scope, np.array(tokens, np.int32))
        nodes = match.to_restore
        if not nodes or any(node.busy for node in nodes) or sum(map(len, nodes)) > self.cells.n_free:
            return
        self.restores.append(self.cache.begin_restore(nodes))

    @precondition(lambda self: self.restores)
    @rule(data=st.data(), ok=st.booleans(), forget=st.booleans())
    def end_restore(self, data: st.DataObject, ok: bool, forget: bool) -> None:
        ticket = self.restores.pop(data.draw(st.integers(0, len(self.restores) - 1)))
        if not ok:
            self.cache.abort_restore(ticket, forget=forget)
            return
        out = np.zeros((len(ticket.cells), RECORD), np.uint8)
        at = 0
        for records in ticket.records:
            records.copy_to(out[at : at + len(records)])
            at += len(records)
        self.pool[ticket.cells] = out.view(np.uint64).ravel()
        self.cache.commit_restore(ticket)

    @rule(n=st.integers(1, 30))
    def drop_cells(self, n: int) -> None:
        known = self.known()
        free = self.cells.n_free
        assert self.cache.drop_cells(n) == self.cells.n_free - free
        assert self.known() == known, "dropping clean cells lost an entry"

    @rule(n=st.integers(1, 30))
    def drop_dirty(self, n: int) -> None:
        self.cache.drop_dirty_cells(n)

    def known(self) -> set[tuple[int, int]]:
        return {(id(node), self.cache.depth(node)) for node in self.cache.nodes()}

    @invariant()
    def sound(self) -> None:
        self.cache.check_invariants()
        self.cells.check_invariants(self.cache.held_cells())

    def teardown(self) -> None:
        self.check_contents()
        self.check_all_cells_can_be_had()

    def check_all_cells_can_be_had(self) -> None:
        """When everybody has left and nothing is under way, the scheduler's rule 3 frees every cell."""
        for lane, (_, tokens, node, shared) in self.running.items():
            end = self.cache.extend(lane, node, shared, np.array(tokens[shared:], np.int32))
            self.cells.seq_rm(lane)
            self.cache.unlock(end)
        for ticket, _ in self.saves:
            self.cache.abort_save(ticket)
        for restore in self.restores:
            self.cache.abort_restore(restore, forget=False)
        while self.cache.drop_cells(64) or self.cells.n_free < 64:
            if (ticket := self.cache.begin_save_oldest()) is not None:
                sizes = page_sizes(len(ticket.cells))
                self.cache.commit_save(ticket, [np.zeros((size, RECORD), np.uint8) for size in sizes])
            elif self.cells.n_free < 64:
                assert self.cache.drop_dirty_cells(64), "idle cells are stuck"
        self.sound()

    def check_contents(self) -> None:
        """Whatever is in the tree can be matched and holds the right contents."""
        for scope in ("", "tenant"):
            root = self.cache.root(scope)
            stack = [(child, ()) for child in root.children.values()]
            while stack:
                node, prefix = stack.pop()
                tokens = prefix + tuple(node.tokens.tolist())
                self.check_path(scope, tokens, node)
                stack += [(child, tokens) for child in node.children.values()]


TestPromptCache = CacheMachine.TestCase
TestPromptCache.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def run(cache: PromptCache, cells: KVCells, tokens: tuple[int, ...], scope: str = "") -> Node:
    """A sequence comes, computes what is not resident, and goes."""
    ids = np.array(tokens, np.int32)
    match = cache.match_prefix(scope, ids)
    node = (cache.path(match.node, match.n_tokens) or [cache.root(scope)])[-1]
    assert match.n_resident == match.n_tokens
    cache.lock(node)
    for step in cache.path(node, match.n_tokens):
        cells.seq_share(0, step.cells)
    cells.seq_grow(0, len(tokens) - match.n_tokens)
    end = cache.extend(0, node, match.n_tokens, ids[match.n_tokens :])
    cells.seq_rm(0)
    cache.unlock(end)
    return end


def save(cache: PromptCache, node: Node) -> int:
    """Saves what is new on the path; returns how many records that were."""
    ticket = cache.begin_save(node)
    if ticket is None:
        return 0
    cache.commit_save(ticket, [np.zeros((n, cache.record_bytes), np.uint8) for n in page_sizes(len(ticket.cells))])
    return len(ticket.cells)


def make(budget: int | None = None) -> tuple[KVCells, PromptCache]:
    cells = KVCells(100, 1, 100)
    return cells, PromptCache(cells, RECORD, budget)


def test_the_next_turn_of_a_conversation_saves_only_its_new_tokens() -> None:
    cells, cache = make()
    assert save(cache, run(cache, cells, tuple(range(20)))) == 20
    assert save(cache, run(cache, cells, tuple(range(33)))) == 13
    assert save(cache, run(cache, cells, tuple(range(20)))) == 0
    assert cache.used_bytes == 33 * RECORD


def test_no_hit_before_commit_and_none_after_abort() -> None:
    cells, cache = make()
    node = run(cache, cells, (1, 2, 3))
    ticket = cache.begin_save(node)
    assert ticket is not None
    assert cache.begin_save(node) is None, "two saves of one prefix were begun"
    assert cache.drop_cells(100) == 0, "cells were dropped while their save was under way"
    cache.abort_save(ticket)
    assert cache.used_bytes == 0
    assert cache.n_entries == 0
    assert cache.drop_cells(100) == 0, "an unsaved prefix was dropped as if it were saved"


def test_a_prefix_cut_while_it_is_saved_is_saved_in_both_parts() -> None:
    cells, cache = make()
    ticket = cache.begin_save(run(cache, cells, (1, 2, 3, 4)))
    assert ticket is not None
    match = cache.match_prefix("", np.array([1, 2, 9], np.int32))
    assert match.n_tokens == 2
    cache.commit_save(ticket, [np.arange(4 * RECORD, dtype=np.uint8).reshape(4, RECORD)])
    assert cache.drop_cells(100) == 4
    match = cache.match_prefix("", np.array([1, 2, 3, 4], np.int32))
    assert (match.n_tokens, match.n_resident, len(match.to_restore)) == (4, 0, 2)
    cache.check_invariants()


def test_an_entry_larger_than_the_budget_is_refused_and_its_cells_can_be_dropped() -> None:
    cells, cache = make(budget=4 * RECORD)
    node = run(cache, cells, (1, 2, 3, 4, 5))
    assert cache.begin_save(node) is None
    assert cache.counters.saves_refused == 1
    assert cache.begin_save_oldest() is None
    assert cache.drop_dirty_cells(1) == 5


def test_a_conversation_that_outgrows_the_budget_keeps_what_fits_and_no_cells() -> None:
    """Its later turns are not saved by themselves: nobody could ever restore them."""
    cells, cache = make(budget=4 * RECORD)
    assert save(cache, run(cache, cells, (1, 2, 3))) == 3
    for n in (6, 9, 12):
        assert save(cache, run(cache, cells, tuple(range(1, n + 1)))) == 0
    cache.drop_cells(100)
    assert cache.begin_save_oldest() is None
    cache.drop_dirty_cells(100)
    assert cells.n_free == 100
    assert cache.match_prefix("", np.arange(1, 13, dtype=np.int32)).n_tokens == 3


def test_a_save_without_room_evicts_nothing_and_finds_room_later() -> None:
    cells, cache = make(budget=8 * RECORD)
    for start in (10, 20):
        save(cache, run(cache, cells, tuple(range(start, start + 4))))
    cache.drop_cells(100)
    restored = cache.match_prefix("", np.arange(10, 14, dtype=np.int32))
    ticket = cache.begin_restore(restored.to_restore)
    node = run(cache, cells, tuple(range(30, 36)))
    assert save(cache, node) == 0, "the records that are being restored were dropped"
    assert cache.n_entries == 2
    cache.commit_restore(ticket)
    assert save(cache, node) == 6


def test_a_failed_restore_forgets_a_conversation_of_any_depth() -> None:
    cells = KVCells(2000, 1, 2000)
    cache = PromptCache(cells, RECORD, None)
    for n in range(1, 1500):
        save(cache, run(cache, cells, tuple(range(n))))
    cache.drop_cells(2000)
    match = cache.match_prefix("", np.arange(1, dtype=np.int32))
    cache.abort_restore(cache.begin_restore(match.to_restore), forget=True)
    assert cache.n_entries == cache.used_bytes == len(list(cache.nodes())) == 0


def test_making_room_looks_at_what_goes_not_at_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request's end saves, each save of a full cache evicts: among 50,000 entries that once took 0.1 s."""
    cells, cache = make(budget=1000 * RECORD)
    looked: list[Node] = []
    can_drop = PromptCache._can_drop_records
    monkeypatch.setattr(
        PromptCache, "_can_drop_records", lambda self, node, *gone: looked.append(node) or can_drop(self, node, *gone)
    )
    for i in range(1200):
        save(cache, run(cache, cells, (i, 0, 0, 0)))
        cache.drop_cells(100)
    assert cache.n_entries == 250
    assert len(looked) <= 1200


def test_the_oldest_entry_makes_room_and_its_miss_says_why() -> None:
    cells, cache = make(budget=8 * RECORD)
    for start in (10, 20, 30):
        save(cache, run(cache, cells, tuple(range(start, start + 4))))
    cache.drop_cells(100)
    first = np.arange(10, 14, dtype=np.int32)
    match = cache.match_prefix("", first)
    assert match.n_tokens == 4, "the entry is still resident, only its records made room"
    cache.begin_save_oldest()
    assert cache.used_bytes <= 8 * RECORD


@pytest.mark.parametrize(
    ("scope", "tokens", "reason"),
    [("", (9, 9), "no_entry"), ("other", (1, 2, 3), "other_scope"), ("", (5, 6, 7), "evicted")],
)
def test_every_miss_has_its_reason(scope: str, tokens: tuple[int, ...], reason: str) -> None:
    cells, cache = make(budget=3 * RECORD)
    save(cache, run(cache, cells, (5, 6, 7)))
    cache.drop_cells(3)
    save(cache, run(cache, cells, (1, 2, 3)))
    ids = np.array(tokens, np.int32)
    match = cache.match_prefix(scope, ids)
    cache.count_lookup(scope, ids, match.n_resident, 0)
    assert dict(cache.counters.misses) == {reason: 1}


def test_scopes_never_see_each_other() -> None:
    cells, cache = make()
    run(cache, cells, (1, 2, 3), scope="a")
    assert cache.match_prefix("b", np.array([1, 2, 3], np.int32)).n_tokens == 0
    assert cache.match_prefix("a", np.array([1, 2, 3], np.int32)).n_tokens == 3
