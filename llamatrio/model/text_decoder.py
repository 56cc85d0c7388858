"""UTF-8 from pieces of any size."""

from __future__ import annotations

import codecs


class TextDecoder:
    """Turns bytes that arrive in pieces into text, never showing half a character.

    Whatever the pieces, the joined output is that of decoding all the bytes at once with "replace": bytes that
    cannot become UTF-8 are U+FFFD, and so is a character cut off at the very end (one, in `flush`).
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_between = True
        """No character is half decoded."""

    def feed(self, data: bytes) -> str:
        """The text that is certain after `data`; an incomplete character is held back."""
        if self._is_between and data.isascii():
            return data.decode("ascii")
        text = self._decoder.decode(data)
        self._is_between = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        """Ends the text: "" or, for a character that was cut off, U+FFFD. The decoder is then as new."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._is_between = True
        return text
