from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llamatrio.sched.text import TextAssembler

WORDS = st.lists(st.text("ab\n😀", min_size=1, max_size=3), max_size=3)


def cut(text: str, stop: list[str]) -> tuple[str, str | None]:
    """What must come out: everything before the first stop string."""
    found = [(text.find(word), order) for order, word in enumerate(stop) if word in text]
    if not found:
        return text, None
    at, order = min(found)
    return text[:at], stop[order]


@given(st.text("ab\n😀", max_size=12), WORDS, st.data())
def test_any_pieces_give_the_text_before_the_first_stop_string(text: str, stop: list[str], data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    assembler, out, word = TextAssembler(stop), "", None
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        shown = assembler.feed(raw[start:end])
        out += shown.text
        if shown.stopping_word is not None:
            word = shown.stopping_word
            break
        assert "\ufffd" not in shown.text
    else:
        out += assembler.flush()
    expected, expected_word = cut(text, stop)
    # A shorter stop string may be complete before a longer one that begins earlier is.
    assert (out, word) == (expected, expected_word) or (word is not None and out + word in text)


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
