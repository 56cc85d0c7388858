"""The bench's client counts right, however the network cuts what it reads."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bench.common import percentile
from bench.sse import ChunkedBody, EventCounter

# "data:" and line feeds within JSON strings (escaped, as JSON has them), keep-alive comments, and empty pieces.
EVENTS = st.lists(
    st.sampled_from([b'{"content":"data: x"}', b'{"content":"\\n\\ndata:"}', b"[DONE]", b"{}"]), max_size=8
)
IS_PING = st.lists(st.booleans(), min_size=8, max_size=8)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    """`data` in pieces; the same border twice gives an empty one."""
    borders = sorted({0, len(data)} | {i % (len(data) + 1) for i in at})
    return [data[a:b] for a, b in pairwise(borders)] or [data]


def body_of(events: list[bytes], is_ping: list[bool]) -> bytes:
    """Events, with keep-alives before some of them."""
    return b"".join(b": ping\n\n" * ping + b"data: " + e + b"\n\n" for e, ping in zip(events, is_ping, strict=False))


@given(events=EVENTS, is_ping=IS_PING, at=st.lists(st.integers(0, 400)))
def test_events_are_counted_when_they_end(events: list[bytes], is_ping: list[bool], at: list[int]) -> None:
    body = body_of(events, is_ping)
    counter, seen = EventCounter(), b""
    for piece in cut(body, at):
        seen += piece
        counter.feed(piece)
        complete = seen[: seen.rfind(b"\n\n") + 2] if b"\n\n" in seen else b""
        assert counter.n_events == sum(block.startswith(b"data:") for block in complete.split(b"\n\n"))
    assert counter.n_events == len(events)
    assert counter.last == (b"data: " + events[-1] if events else b"")


def test_a_keep_alive_after_the_last_event_does_not_replace_it() -> None:
    counter = EventCounter()
    assert counter.feed(b"data: 1\n\ndata: 2\n\n: ping\n\n") == 2
    assert counter.last.startswith(b"data: 2")
    assert counter.feed(b": ping\n\n") == 0
    assert counter.last.startswith(b"data: 2")


@given(parts=st.lists(st.binary(min_size=1, max_size=40), max_size=6), at=st.lists(st.integers(0, 400)))
def test_chunks_are_joined(parts: list[bytes], at: list[int]) -> None:
    wire = b"".join(b"%x;note=1\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    body = ChunkedBody()
    *pieces, last = cut(wire, at)
    content = b""
    for piece in pieces:
        content += body.feed(piece)
        assert not body.is_done
    content += body.feed(last)
    assert (content, body.is_done) == (b"".join(parts), True)


@given(st.lists(st.floats(0, 1), min_size=1), st.floats(0.01, 1))
def test_percentile_is_the_least_value_that_covers_the_share(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) * (1 - 1e-12)
    below = [value for value in values if value < found]
    assert len(below) < share * len(values)
