"""Back-pressure for one HTTP/2 stream."""

from __future__ import annotations

import trio

HIGH_WATER = 1 << 15
"""Bytes from which on an app waits for its peer to take some."""
LOW_WATER = 1 << 14
"""Bytes down to which the peer must have taken them before the app goes on."""


class Outbox:
    """What one stream's app has sent and flow control has not yet let go."""

    __slots__ = ("_waiters", "data", "is_closed", "is_complete")

    def __init__(self) -> None:
        self.data = bytearray()
        self.is_complete = False
        """The app has sent all; END_STREAM goes out with the last byte."""
        self.is_closed = False
        """END_STREAM is on its way, or the stream has died: no byte more."""
        self._waiters = trio.lowlevel.ParkingLot()

    def take(self, size: int) -> bytes:
        """Removes up to `size` bytes."""
        taken = bytes(self.data[:size])
        del self.data[:size]
        if self._waiters and len(self.data) <= LOW_WATER:
            self._waiters.unpark_all()
        return taken

    def close(self) -> None:
        """Drops what is left and lets waiting apps go on."""
        self.is_closed = True
        self.data.clear()
        self._waiters.unpark_all()

    async def room(self) -> None:
        """Waits until the app may send more."""
        while len(self.data) > LOW_WATER and not self.is_closed:
            await self._waiters.park()

    async def closed(self) -> None:
        """Waits until the stream needs the outbox no more."""
        while not self.is_closed:
            await self._waiters.park()
