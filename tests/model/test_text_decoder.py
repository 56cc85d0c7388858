from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from llamatrio.model.text_decoder import TextDecoder


def in_pieces(data: bytes, cuts: list[int]) -> list[str]:
    decoder = TextDecoder()
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    texts = [decoder.feed(data[a:b]) for a, b in pairwise(bounds)]
    return [*texts, decoder.flush()]


@given(
    st.one_of(st.binary(max_size=40), st.text(max_size=20).map(lambda t: t.encode("utf-8", "replace"))),
    st.lists(st.integers(0, 100)),
)
def test_any_split_gives_the_same_text(data: bytes, cuts: list[int]) -> None:  # B22
    assert "".join(in_pieces(data, cuts)) == data.decode("utf-8", "replace")


def test_a_character_is_held_back_until_it_is_whole() -> None:  # B22
    decoder = TextDecoder()
    emoji, cjk = "😀".encode(), "日".encode()
    assert [decoder.feed(piece) for piece in (emoji[:2], emoji[2:], b"b", cjk[:2], cjk[2:])] == [
        "",
        "😀",
        "b",
        "",
        "日",
    ]
    assert decoder.flush() == ""


def test_a_cut_character_is_one_replacement_at_the_end() -> None:  # B22
    decoder = TextDecoder()
    assert decoder.feed(b"ok" + "😀".encode()[:3]) == "ok"
    assert decoder.flush() == "\ufffd"
    assert decoder.feed(b"new") + decoder.flush() == "new"
