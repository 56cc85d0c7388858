from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llamatrio.sched.stops import MAX_STOP
from llamatrio.sched.text import TextAssembler

WORDS = st.lists(st.text("ab\n😀", min_size=1, max_size=5), max_size=5)


def cut(text: str, stop: list[str]) -> tuple[str, str | None]:
    """What must come out: everything before the stop string that is complete first, the longest of such."""
    found = [(text.find(word) + len(word), -len(word), word) for word in stop if word in text]
    if not found:
        return text, None
    end, _, word = min(found)
    return text[: end - len(word)], word


def n_held(text: str, stop: list[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    return max((n for word in stop for n in range(len(word)) if text.endswith(word[:n])), default=0)


@given(st.text("ab\n😀", max_size=12), WORDS, st.data())
def test_any_pieces_give_the_text_before_the_first_stop_string(text: str, stop: list[str], data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(["", *stop]))[:-1] + text + data.draw(st.sampled_from(["", *stop]))
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    assembler, out, word = TextAssembler(stop), "", None
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        shown = assembler.feed(raw[start:end])
        out += shown.text
        if shown.stopping_word is not None:
            word = shown.stopping_word
            break
        so_far = raw[:end].decode(errors="ignore")
        assert out == so_far[: len(so_far) - n_held(so_far, stop)], "held back too much or too little"
    else:
        out += assembler.flush()
    assert (out, word) == cut(text, stop)


def test_what_may_become_a_stop_string_is_held_back_until_it_is_decided() -> None:
    assembler = TextAssembler(["<end>"])
    assert assembler.feed(b"one<e").text == "one"
    assert assembler.feed(b"gg").text == "<egg"
    assert assembler.feed(b"<en").text == ""
    assert assembler.feed(b"d> rest") == ("", "<end>")


def test_what_is_held_back_at_the_end_is_shown() -> None:
    assembler = TextAssembler(["<end>"])
    assembler.feed(b"<en")
    assert assembler.flush() == "<en"


def test_b22_a_character_split_over_tokens_comes_out_whole_and_a_cut_one_once() -> None:
    assembler = TextAssembler()
    assert [assembler.feed(piece).text for piece in (b"\xf0\x9f", b"\x98\x80", b"b")] == ["", "\U0001f600", "b"]
    assembler.feed(b"\xf0\x9f")
    assert assembler.flush() == "\ufffd"


def test_an_empty_stop_string_is_ignored() -> None:
    assembler = TextAssembler(["", "b"])
    assert assembler.feed(b"a").text == "a"
    assert assembler.feed(b"b").stopping_word == "b"


def test_many_long_stop_strings_cost_no_more_than_one() -> None:
    """Strings that each piece may begin anew: to search for each of them took a hundred times as long."""
    stop = ["a" * n + "b" for n in range(1, 127)]
    assert sum(map(len, stop)) <= MAX_STOP
    assembler = TextAssembler(stop)
    shown = "".join(assembler.feed(b"a").text for _ in range(100_000))
    assert len(shown) == 100_000 - 126
    assert assembler.feed(b"b").stopping_word == stop[-1]
