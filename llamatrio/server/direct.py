"""A way past ASGI for a stream's events: from the decode task into the connection, without waking the stream's task.

A step makes one event for every stream, and the layers between a stream's task and its socket cost more than the
event itself. So while that task waits for its next event, the engine hands new ones to the connection directly.

Rule 1. Only while the stream's task waits, and only after its first event went the ordinary way: then the head of the
        answer is out, and bytes stay in order.
Rule 2. Nothing here waits. What the socket does not take at once stays with the connection, and the stream's task is
        woken to wait for it; until it waits for events again, events queue up for it as ever.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import trio

from llamatrio.engine.events import Take, TokenEvent

DIRECT = "llamatrio.direct"
"""Key of a `Direct` in an ASGI scope's extensions."""

WAKE = TokenEvent("", ())
"""In place of an event: the connection has bytes of this stream to wait for."""


class Direct(Protocol):
    """One stream's connection, as the stream's body sees it once the head is out."""

    def can_take(self) -> bool:
        """Whether bytes that are given now follow those that were given before."""
        ...

    def take(self, data: bytes) -> bool:
        """Takes a piece of the body, whole; False when somebody should wait until it is `drained`."""
        ...

    async def drained(self) -> None:
        """Waits until the connection takes more, or has ended."""
        ...


class DirectTasks:
    """A task group that tells the apps it starts of a `Direct`."""

    def __init__(self, tasks: Any, direct: Direct) -> None:
        self._tasks = tasks
        self._direct = direct

    async def spawn_app(self, app: Any, config: Any, scope: Any, send: Any) -> Callable[[Any], Awaitable[None]]:
        """As Hypercorn's TaskGroup."""
        scope["extensions"][DIRECT] = self._direct
        deliver: Callable[[Any], Awaitable[None]] = await self._tasks.spawn_app(app, config, scope, send)
        return deliver


class Outlet:
    """Where the events of one answer leave. Made with the answer, opened when it is sent."""

    def __init__(self) -> None:
        self._direct: Direct | None = None
        self.sent_at = trio.current_time()
        """When something left."""

    def open(self, direct: Direct | None) -> None:
        """The answer is about to be sent; `direct` is what its connection offers."""
        self._direct = direct

    def taking(self, piece: Callable[[TokenEvent], bytes]) -> Take | None:
        """What a generation is to offer its events to: returns what its reader is to get instead, if anything."""
        direct = self._direct
        if direct is None:
            return None

        def take(event: TokenEvent, now: float) -> TokenEvent | None:
            if not direct.can_take():
                return event
            data = piece(event)
            if not data:
                return None
            self.sent_at = now
            return None if direct.take(data) else WAKE

        return take

    async def drained(self) -> None:
        """Waits for the bytes that `WAKE` was about."""
        assert self._direct is not None
        await self._direct.drained()
