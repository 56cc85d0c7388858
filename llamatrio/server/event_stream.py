"""The body of a streamed answer: the events of its generations, one after the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from llamatrio.engine.events import Finished, TokenEvent
from llamatrio.errors import LlamatrioError
from llamatrio.server.asgi import StreamResponse
from llamatrio.server.direct import WAKE, Outlet
from llamatrio.server.failures import error_body
from llamatrio.server.ports import Generation
from llamatrio.server.results import failure_of
from llamatrio.server.service import Job, Start
from llamatrio.server.stream import event


class ChoiceWriter(Protocol):
    """Writes what one generation makes as server-sent events."""

    def piece(self, item: TokenEvent) -> bytes:
        """The event for new tokens; nothing when there is nothing to tell yet."""
        ...

    def closing(self, finished: Finished) -> bytes:
        """The event that says how it ended."""
        ...


NewWriter = Callable[[int, Job, Generation], ChoiceWriter]
Ending = Callable[[Sequence[Finished]], bytes]


def stream_answer(
    start: Start, jobs: Sequence[Job], new_writer: NewWriter, ending: Ending, ping_interval: float
) -> StreamResponse:
    """Starts the first job, which raises while a refusal can still be a status, and answers with all jobs' events."""
    outlet = Outlet()
    return StreamResponse(stream_jobs(start, jobs, start(jobs[0]), new_writer, ending, outlet), outlet, ping_interval)


async def stream_jobs(
    start: Start, jobs: Sequence[Job], first: Generation, new_writer: NewWriter, ending: Ending, outlet: Outlet
) -> AsyncIterator[bytes]:
    """All jobs' events, then what `ending` makes of their results; a failure is the stream's last event.

    `first` is the first job's generation, started while a refusal could still be a status. The others start in
    turn: at once would leave them with a reader that takes nothing, and the engine cancels such streams.
    Most events do not come through here: see `outlet`.
    """
    done: list[Finished] = []
    try:
        for index, job in enumerate(jobs):
            generation = start(job) if index else first
            writer = new_writer(index, job, generation)
            is_diverted = False
            async for item in generation:
                if isinstance(item, Finished):
                    if (failure := failure_of(item)) is not None:
                        raise failure
                    done.append(item)
                    yield writer.closing(item)
                elif item is WAKE:
                    await outlet.drained()
                elif chunk := writer.piece(item):
                    yield chunk
                    if not is_diverted:  # the head of the answer is out
                        generation.divert(outlet.taking(writer.piece))
                        is_diverted = True
    except LlamatrioError as error:
        yield event(error_body(error))
        return
    if last := ending(done):
        yield last
