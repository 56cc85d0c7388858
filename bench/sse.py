"""Server-sent events and chunked bodies, read at next to no cost: bytes are scanned, never decoded.

Both readers give the same answer however the bytes are cut.
"""

from __future__ import annotations


class EventCounter:
    """Counts the events of a body; comments (keep-alives) do not count."""

    def __init__(self) -> None:
        self.n_events = 0
        self.last = b""
        """The last event, from its `data:` on."""
        self._rest = b""

    def feed(self, data: bytes) -> int:
        """How many events end in these bytes. JSON escapes its line feeds, so an empty line is always a border."""
        data = self._rest + data
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            self._rest = data
            return 0
        self._rest = data[end:]
        n = data.count(b"\n\ndata:", 0, end) + data.startswith(b"data:")
        if n:
            self.last = data[max(0, data.rfind(b"\n\ndata:", 0, end)) : end].strip()
        self.n_events += n
        return n


class ChunkedBody:
    """Takes the chunks out of an HTTP/1.1 body with `transfer-encoding: chunked`."""

    def __init__(self) -> None:
        self.is_done = False
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The content of the chunks that are complete now."""
        data = self._rest + data
        at, content = 0, []
        while not self.is_done and (line_end := data.find(b"\r\n", at)) >= 0:
            size = int(data[at:line_end].partition(b";")[0], 16)
            end = line_end + 2 + size
            if len(data) < end + 2:
                break
            content.append(data[line_end + 2 : end])
            self.is_done = size == 0
            at = end + 2
        self._rest = data[at:]
        return b"".join(content)
