"""The sampler: candidates against whole rows, and the chain against a plain NumPy rendering of it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamatrio.sched.chain import uniform
from llamatrio.sched.penalties import Window, penalize_row, penalized
from llamatrio.sched.sampler import Choice, Row, Sampler
from llamatrio.sched.types import SamplingParams

N = 300
params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 40]),
    top_p=st.sampled_from([0.3, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    repeat_penalty=st.sampled_from([0.8, 1.0, 1.5]),
    repeat_last_n=st.sampled_from([-1, 0, 4, 64]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    logit_bias=st.sampled_from([(), ((3, -math.inf),), ((3, 5.0), (7, -2.0))]),
    n_probs=st.sampled_from([0, 5]),
)


def random_row(seed: int) -> np.ndarray:
    # Rounded, so that equal logits occur.
    return np.random.default_rng(seed).normal(0, 3, N).round(1).astype(np.float32)


def row_of(logits: np.ndarray, k: int | None) -> Row:
    """What a backend would report."""
    order = np.lexsort((np.arange(N), -logits))[: k or 1]
    total = float(np.log(np.exp(logits.astype(np.float64)).sum()))
    return Row(order.tolist(), logits[order].tolist(), total, logits if k is None else None)


def choice_of(row: Row, params: SamplingParams, tokens: list[int], banned: Any = (), seed: int = 1) -> Choice:
    choice = Sampler(replace(params, ignore_eos=True), seed, banned).next_token(row, tokens, 0)
    assert choice is not None
    return choice


def n_candidates(params: SamplingParams, tokens: Any = (), banned: Any = ()) -> int | None:
    return Sampler(replace(params, ignore_eos=True), 1, banned).n_candidates(tokens, 0)


def plain_chain(logits: np.ndarray, params: SamplingParams, tokens: list[int], banned: set[int]) -> np.ndarray:
    """Probabilities of all tokens after llama-server's chain, in float64 over the whole vocabulary."""
    x = logits.astype(np.float64)
    for token, bias in params.logit_bias:
        x[token] += bias
    recent = (
        [] if params.repeat_last_n == 0 else tokens if params.repeat_last_n < 0 else tokens[-params.repeat_last_n :]
    )
    for token in set(recent):
        x[token] = x[token] / params.repeat_penalty if x[token] > 0 else x[token] * params.repeat_penalty
        x[token] -= recent.count(token) * params.frequency_penalty + params.presence_penalty
    x[list(banned)] = -math.inf
    order = np.lexsort((np.arange(len(x)), -x))
    out = np.zeros(len(x))
    if params.temperature <= 0:
        out[order[0]] = 1
        return out
    if params.top_k > 0:
        order = order[: params.top_k]
    p = np.exp(x[order] - x[order[0]])
    p /= p.sum()
    if params.top_p < 1:
        order = order[: int(np.searchsorted(np.cumsum(p), params.top_p)) + 1]
    p = p[: len(order)]
    order = order[: max(1, int((p >= min(params.min_p, 1) * p[0]).sum()))]
    p = np.exp((x[order] - x[order[0]]) / params.temperature)
    out[order] = p / p.sum()
    return out


@settings(max_examples=300, deadline=None)
@given(
    params_strategy, st.integers(0, 50), st.lists(st.integers(0, N - 1), max_size=12), st.sampled_from([set(), {1, 2}])
)
def test_the_reported_candidates_decide_exactly_as_the_whole_row(params, seed, tokens, banned) -> None:
    logits = random_row(seed)
    k = n_candidates(params, tokens, banned)
    by_best = choice_of(row_of(logits, k), params, tokens, banned, 7)
    by_row = choice_of(row_of(logits, None), params, tokens, banned, 7)
    assert by_best.id == by_row.id
    assert by_best.logprob == pytest.approx(by_row.logprob, abs=1e-5)
    assert [t.id for t in by_best.top] == [t.id for t in by_row.top]
    chain = plain_chain(logits, params, tokens, banned)
    assert chain[by_best.id] > 0
    if params.temperature <= 0:
        assert chain[by_best.id] == 1


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.3, top_k=0, top_p=0.8), SamplingParams(top_k=3)])
def test_draws_follow_the_chains_probabilities(params: SamplingParams) -> None:
    logits = random_row(3)
    row = row_of(logits, n_candidates(params))
    n = 4000
    counts = np.zeros(N)
    for seed in range(n):
        counts[choice_of(row, params, [1], (), seed).id] += 1
    expected = plain_chain(logits, params, [1], set())
    assert (counts[expected == 0] == 0).all()
    deviation = np.abs(counts / n - expected)
    assert (deviation <= 5 * np.sqrt(expected * (1 - expected) / n) + 1e-9).all()


def test_the_same_seed_and_position_draw_the_same_number_and_others_do_not() -> None:
    numbers = {(seed, p): uniform(seed, p) for seed in range(40) for p in range(40)}
    assert len(set(numbers.values())) == len(numbers)
    assert all(0 <= number < 1 for number in numbers.values())
    assert abs(np.mean(list(numbers.values())) - 0.5) < 0.03
    assert uniform(2**63, 5) == uniform(2**63, 5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b40_top_tokens_are_sorted_and_the_models_own_at_every_temperature(temperature: float) -> None:
    logits = random_row(5)
    params = SamplingParams(temperature, n_probs=5, repeat_penalty=1.4)
    row = row_of(logits, n_candidates(params, [4, 5]))
    choice = choice_of(row, params, [4, 5])
    truth = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    assert [t.logprob for t in choice.top] == pytest.approx(np.sort(truth)[::-1][:5].tolist(), abs=1e-5)
    assert choice.logprob == pytest.approx(float(truth[choice.id]), abs=1e-5)
    assert sum(math.exp(t.logprob) for t in choice.top) <= 1


def test_post_sampling_probabilities_are_those_of_the_chain() -> None:
    logits = random_row(5)
    params = SamplingParams(top_k=3, top_p=1.0, min_p=0.0, n_probs=5, post_sampling_probs=True)
    choice = choice_of(row_of(logits, 5), params, [1])
    assert sum(math.exp(t.logprob) for t in choice.top) == pytest.approx(1)
    expected = plain_chain(logits, params, [1], set())
    assert [math.exp(t.logprob) for t in choice.top] == pytest.approx(np.sort(expected)[::-1][:3].tolist(), abs=1e-6)


def test_b10_the_penalty_window_spans_prompt_and_output() -> None:
    window = Window(3)
    assert window.counts([9, 1, 2, 2]) == {1: 1, 2: 2}
    assert window.counts([9, 1, 2, 2, 3, 9]) == {2: 1, 3: 1, 9: 1}
    assert Window(0).counts([9, 1]) == {}


@given(st.integers(-1, 8), st.lists(st.lists(st.integers(0, 4), max_size=12), max_size=8))
def test_a_window_that_follows_its_tokens_counts_what_a_recount_does(n: int, pieces: list[list[int]]) -> None:
    window, tokens = Window(n), list[int]()
    for piece in pieces:
        tokens += piece
        assert window.counts(tokens) == Counter(tokens if n < 0 else tokens[max(0, len(tokens) - n) :])


numbers = st.floats(-100, 100, width=32)


@given(
    st.lists(st.one_of(numbers, st.just(-math.inf)), min_size=5, max_size=5),
    st.dictionaries(st.integers(0, 4), st.integers(1, 1000)),
    st.builds(
        SamplingParams,
        repeat_penalty=st.floats(1e-9, 1e9),
        frequency_penalty=st.floats(-1e9, 1e9),
        presence_penalty=st.floats(-1e9, 1e9),
    ),
)
def test_a_row_is_penalized_as_its_tokens_are_bit_for_bit(
    logits: list[float], counts: dict[int, int], params: SamplingParams
) -> None:
    row = np.array(logits)
    penalize_row(row, counts, params)
    assert row.tolist() == [penalized(x, counts.get(i, 0), params) for i, x in enumerate(logits)]


def plain_draw(logits: np.ndarray, params: SamplingParams, tokens: list[int], seed: int) -> int:
    """Walks the whole sorted vocabulary."""
    x = plain_chain(logits, params, tokens, set())
    order = np.lexsort((np.arange(len(logits)), -logits))
    return int(order[np.searchsorted(np.cumsum(x[order]), uniform(seed, len(tokens)), side="right")])


@settings(max_examples=200)
@given(
    st.integers(0, 20),
    st.sampled_from([0.1, 1.0, 5.0]),
    st.builds(
        SamplingParams,
        top_k=st.just(0),
        temperature=st.sampled_from([0.3, 1.0, 2.0]),
        top_p=st.sampled_from([-1.0, 0.0, 0.3, 0.9, 0.999, 1.0, 1.5]),
        min_p=st.sampled_from([-1.0, 0.0, 1e-6, 0.05, 1.0, 2.0]),
        n_probs=st.sampled_from([0, 5]),
        post_sampling_probs=st.booleans(),
    ),
    st.integers(0, 1 << 40),
)
def test_draws_from_a_whole_vocabulary_are_those_of_the_sorted_row(
    salt: int, scale: float, params: SamplingParams, seed: int
) -> None:
    """However much of the row is sorted: flat rows reach far into it, steep ones do not."""
    logits = np.random.default_rng(salt).normal(0, scale, 6000).round(2).astype(np.float32)
    row = Row([], [], float(np.log(np.exp(logits.astype(np.float64)).sum())), logits)
    choice = choice_of(row, params, [1], seed=seed)
    assert choice.id == plain_draw(logits, params, [1], seed)
    if params.n_probs and params.post_sampling_probs:
        chain = plain_chain(logits, params, [1], set())
        assert math.exp(choice.logprob) == pytest.approx(chain[choice.id])
        expected = np.sort(chain)[::-1][:5]
        assert [math.exp(t.logprob) for t in choice.top] == pytest.approx(expected[expected > 0].tolist())


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repeat_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_params_that_make_no_numbers_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("repeat_penalty", 0.0), ("seed", 1.5), ("logit_bias", ((1, math.inf),)), ("logit_bias", ((1, math.nan),))],
)
def test_params_that_the_sampler_cannot_take_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


wild = st.one_of(st.floats(-1e9, 1e9), st.sampled_from([0.0, 1e9, -1e9]))
no_numbers = st.sampled_from([math.nan, math.inf, -math.inf])


@given(
    st.lists(st.one_of(numbers, no_numbers), min_size=3, max_size=12),
    st.builds(
        SamplingParams,
        temperature=wild,
        top_k=st.integers(-1, 12),
        top_p=st.floats(-1, 2),
        min_p=st.floats(-1, 2),
        repeat_penalty=st.floats(1e-9, 1e9),
        frequency_penalty=wild,
        presence_penalty=wild,
        logit_bias=st.lists(st.tuples(st.integers(0, 2), st.one_of(wild, st.just(-math.inf))), max_size=3).map(tuple),
        n_probs=st.integers(0, 12),
        post_sampling_probs=st.booleans(),
    ),
    st.lists(st.integers(0, 2), min_size=1, max_size=8),
    st.sets(st.integers(0, 2)),
    st.booleans(),
)
def test_any_params_choose_a_token_that_may_be_chosen_of_any_row(
    logits: list[float], params: SamplingParams, tokens: list[int], eog_ids: set[int], whole: bool
) -> None:
    """One request's numbers never end the server, for whose other requests the sampler works as well."""
    chooser = Sampler(params, 1, eog_ids)
    if whole or (k := chooser.n_candidates(tokens, 0)) is None:
        row = Row([], [], math.nan, np.array(logits, np.float32))
    else:  # of the best, as a device reports them; where those with NaN stand is its own affair
        order = sorted(range(len(logits)), key=lambda i: (not math.isnan(logits[i]), -logits[i], i))[:k]
        row = Row(order, [logits[i] for i in order], math.nan, None)
    banned = {token for token, bias in params.logit_bias if bias == -math.inf}
    choice = chooser.next_token(row, tokens, 0)
    possible = [i for i, x in enumerate(logits) if x > -math.inf and i not in banned]
    assert choice is None or choice.id in possible
    assert choice is not None or not possible or (row.full is None and any(map(math.isnan, logits)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 40])
def test_a_ban_outweighs_all_that_lifts_a_token(temperature: float, top_k: int) -> None:
    """Also where the same token has a bias as well, and where a penalty below 1 would lift it."""
    logits = random_row(3)
    best = int(logits.argmax())
    bias = ((best, 1e9), (best, -math.inf), (best, 1e9))
    params = SamplingParams(
        temperature, top_k=top_k, top_p=1.0, min_p=0.0, repeat_penalty=0.5, presence_penalty=-1e9, logit_bias=bias
    )
    row = row_of(logits, n_candidates(params, [best]))
    assert all(choice_of(row, params, [best], seed=seed).id != best for seed in range(50))


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.0), SamplingParams(top_k=0)])
def test_where_nothing_may_be_chosen_there_is_no_choice(params: SamplingParams) -> None:
    eog = {1, 2}
    for logits in (np.full(3, np.nan), np.full(3, -np.inf), np.array([np.nan, 1, 2])):
        for full in (logits.astype(np.float32), None):
            row = Row([0, 1, 2], logits.tolist(), math.nan, full)
            assert Sampler(replace(params, min_tokens=1), 1, eog).next_token(row, [0], 0) is None
    choice = Sampler(replace(params, min_tokens=1), 1, eog).next_token(row, [0, 0], 1)
    assert choice is not None
    assert choice.id in eog
