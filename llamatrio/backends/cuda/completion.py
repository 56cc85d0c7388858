"""Waiting for events: a completion thread for each stream, and nobody else ever waits.

Events of one stream fire in the order in which they were recorded, so one thread can wait for them one after the
other, asleep in the driver (events are made with blocking sync). It takes a thread for each stream: one that slept on
an event of the copy stream could not report a step that ended meanwhile, and a slow save would stall the streams.
Not the driver's host functions: after an error of the context they are never called, and their waiters would hang.
An error of the context makes every wait return at once, with that error: so it reaches every waiter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

from cuda.core import Event

from llamatrio.backends.cuda.device import CUDAError, Gpu, backend_error
from llamatrio.errors import BackendError

T = TypeVar("T")
Then = Callable[[BackendError | None], None]
"""Called in the completion thread, with what the driver reported instead of the event. It must not raise."""

THREAD_NAME = "llamatrio-cuda"


class _Waiter(NamedTuple):
    event: Event
    then: Then


class Completions:
    """One stream's completion thread. Made by `completions`."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._waiters: SimpleQueue[_Waiter | None] = SimpleQueue()

    def when_fired(self, event: Event, then: Then) -> None:
        """Calls `then` when the event, recorded in this thread's stream, has fired; in order of these calls."""
        self._waiters.put(_Waiter(event, then))

    def future(self, event: Event, result: Callable[[], T], error: BackendError | None = None) -> Future[T]:
        """Completes when the event has fired: with `error` where one is given, else with what `result` returns.

        A future with an error waits all the same: what was enqueued before the error has to have run, before
        anybody uses its memory again.
        """
        future: Future[T] = running_future()

        def then(failure: BackendError | None) -> None:
            complete(future, result, failure or error)

        self.when_fired(event, then)
        return future

    def run(self) -> None:
        """The thread's work, until `stop`."""
        while True:
            waiter = self._waiters.get()
            if waiter is not None:
                waiter.then(self._wait(waiter.event))
            elif self._waiters.empty():
                return
            else:  # a waiter asked for another wait: the end comes after it
                self._waiters.put(None)

    def stop(self) -> None:
        """Lets `run` return once everything asked for has been completed."""
        self._waiters.put(None)

    def _wait(self, event: Event) -> BackendError | None:
        try:
            self._gpu.enter()
            event.sync()
        except CUDAError as error:
            return backend_error("the device failed", error)
        return None


def running_future() -> Future[T]:
    """A future that cannot be cancelled: what a device was told to do, it does."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


def failed_future(error: BaseException) -> Future[T]:
    """A future that has failed already."""
    future: Future[T] = running_future()
    future.set_exception(error)
    return future


def complete(future: Future[T], result: Callable[[], T], error: BaseException | None) -> None:
    """Ends a future with the error, or with the result (or whatever making it raises)."""
    if error is not None:
        future.set_exception(error)
        return
    try:
        value = result()
    except Exception as raised:
        future.set_exception(raised)
    else:
        future.set_result(value)


@contextmanager
def completions(gpu: Gpu, name: str) -> Iterator[Completions]:
    """The completion thread of one stream; leaving the block waits for everything that was asked for."""
    queue = Completions(gpu)
    thread = threading.Thread(target=queue.run, name=f"{THREAD_NAME}-{name}", daemon=True)
    thread.start()
    try:
        yield queue
    finally:
        queue.stop()
        thread.join()
