"""Awaiting a backend's futures from Trio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import trio

T = TypeVar("T")

RunBlocking = Callable[..., Awaitable[Any]]
"""Runs a blocking function off the event loop, as trio.to_thread.run_sync does. Tests pass an inline one, because an
autojump clock takes a worker thread for idleness."""


async def completed(future: Future[T]) -> T:
    """Waits for device work and returns its result or raises its error.

    Shielded: what a device was told to do goes on whether anybody waits or not, and its cells and buffers must be
    kept until it is done. So cancellation takes effect at the next checkpoint after it.
    """
    if not future.done():
        done = trio.Event()
        token = trio.lowlevel.current_trio_token()
        future.add_done_callback(lambda _: token.run_sync_soon(done.set))
        with trio.CancelScope(shield=True):
            await done.wait()
    return future.result()


async def all_completed(futures: Sequence[Future[T]]) -> None:
    """Waits for all of them, shielded; then raises the first error there was."""
    errors = []
    for future in futures:
        try:
            await completed(future)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
