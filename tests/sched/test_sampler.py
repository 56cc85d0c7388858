"""The sampler: candidates against whole rows, and the chain against a plain NumPy rendering of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamatrio.sched import sampler
from llamatrio.sched.sampler import Row, next_token
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
    order = np.lexsort((np.arange(N), -x))
    if params.temperature <= 0:
        return np.eye(N)[order[0]]
    if params.top_k > 0:
        order = order[: params.top_k]
    p = np.exp(x[order] - x[order[0]])
    p /= p.sum()
    if params.top_p < 1:
        order = order[: int(np.searchsorted(np.cumsum(p), params.top_p)) + 1]
    p = p[: len(order)]
    order = order[: max(1, int((p >= params.min_p * p[0]).sum()))]
    p = np.exp((x[order] - x[order[0]]) / params.temperature)
    out = np.zeros(N)
    out[order] = p / p.sum()
    return out


@settings(max_examples=300, deadline=None)
@given(
    params_strategy, st.integers(0, 50), st.lists(st.integers(0, N - 1), max_size=12), st.sampled_from([set(), {1, 2}])
)
def test_the_reported_candidates_decide_exactly_as_the_whole_row(params, seed, tokens, banned) -> None:
    logits = random_row(seed)
    k = sampler.n_candidates(params, len(sampler.window(tokens, params)), len(banned))
    by_best = sampler.next_token(row_of(logits, k), params, tokens, banned, 7)
    by_row = sampler.next_token(row_of(logits, None), params, tokens, banned, 7)
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
    k = sampler.n_candidates(params, 0, 0)
    row = row_of(logits, k)
    n = 4000
    counts = np.zeros(N)
    for seed in range(n):
        counts[sampler.next_token(row, params, [1], (), seed).id] += 1
    expected = plain_chain(logits, params, [1], set())
    assert (counts[expected == 0] == 0).all()
    deviation = np.abs(counts / n - expected)
    assert (deviation <= 5 * np.sqrt(expected * (1 - expected) / n) + 1e-9).all()


def test_the_same_seed_and_position_draw_the_same_number_and_others_do_not() -> None:
    numbers = {(seed, p): sampler.uniform(seed, p) for seed in range(40) for p in range(40)}
    assert len(set(numbers.values())) == len(numbers)
    assert all(0 <= number < 1 for number in numbers.values())
    assert abs(np.mean(list(numbers.values())) - 0.5) < 0.03
    assert sampler.uniform(2**63, 5) == sampler.uniform(2**63, 5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b40_top_tokens_are_sorted_and_the_models_own_at_every_temperature(temperature: float) -> None:
    logits = random_row(5)
    params = SamplingParams(temperature, n_probs=5, repeat_penalty=1.4)
    row = row_of(logits, sampler.n_candidates(params, 2, 0))
    choice = sampler.next_token(row, params, [4, 5], (), 1)
    truth = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    assert [t.logprob for t in choice.top] == pytest.approx(np.sort(truth)[::-1][:5].tolist(), abs=1e-5)
    assert choice.logprob == pytest.approx(float(truth[choice.id]), abs=1e-5)
    assert sum(math.exp(t.logprob) for t in choice.top) <= 1


def test_post_sampling_probabilities_are_those_of_the_chain() -> None:
    logits = random_row(5)
    params = SamplingParams(top_k=3, top_p=1.0, min_p=0.0, n_probs=5, post_sampling_probs=True)
    choice = sampler.next_token(row_of(logits, 5), params, [1], (), 1)
    assert sum(math.exp(t.logprob) for t in choice.top) == pytest.approx(1)
    expected = plain_chain(logits, params, [1], set())
    assert [math.exp(t.logprob) for t in choice.top] == pytest.approx(np.sort(expected)[::-1][:3].tolist(), abs=1e-6)


def test_b10_the_penalty_window_spans_prompt_and_output() -> None:
    params = SamplingParams(repeat_penalty=1.5, repeat_last_n=3)
    assert dict(sampler.window([9, 1, 2, 2], params)) == {1: 1, 2: 2}
    assert sampler.window([9, 1], SamplingParams()) == {}


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


@given(
    st.lists(st.one_of(st.floats(-100, 100, width=32), st.just(-math.inf)), min_size=3, max_size=12),
    st.builds(
        SamplingParams,
        temperature=wild,
        top_k=st.integers(-1, 12),
        top_p=st.floats(0, 1),
        min_p=st.floats(0, 1),
        repeat_penalty=st.floats(1e-9, 1e9),
        frequency_penalty=wild,
        presence_penalty=wild,
        logit_bias=st.lists(st.tuples(st.integers(0, 2), st.one_of(wild, st.just(-math.inf))), max_size=3).map(tuple),
    ),
    st.lists(st.integers(0, 2), min_size=1, max_size=8),
    st.sets(st.integers(0, 2)),
)
def test_any_params_choose_a_token_of_any_row(
    logits: list[float], params: SamplingParams, tokens: list[int], banned: set[int]
) -> None:
    """One request's numbers never end the server, for whose other requests the sampler works as well."""
    row = Row(full=np.array(logits, np.float32), ids=(), logits=(), logsumexp=0.0)
    assert 0 <= next_token(row, params, tokens, banned, seed=1).id < len(logits)
