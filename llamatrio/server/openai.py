"""OpenAI's chat and text completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from quart import Response
from quart_trio import QuartTrio

from llamatrio.engine.events import Finished, TokenEvent
from llamatrio.errors import RequestError
from llamatrio.model.chat import text_of
from llamatrio.sched.sampler import Choice
from llamatrio.server.asgi import read_body
from llamatrio.server.event_stream import stream_answer
from llamatrio.server.failures import json_response
from llamatrio.server.ports import Generation
from llamatrio.server.results import Completed, TokenJson, collect_all, finish_reason, timings, usage
from llamatrio.server.schemas import ChatBody, CompletionBody, GenerationBody, decode_body
from llamatrio.server.service import Job, Service
from llamatrio.server.stream import DONE, Head, TextEvent, event


def add_openai_routes(app: QuartTrio, service: Service) -> None:
    """POST /v1/chat/completions and /v1/completions."""
    prefix = service.settings.api_prefix

    @app.post(prefix + "/v1/chat/completions")
    @app.post(prefix + "/chat/completions")
    async def chat() -> Response:
        body = decode_body(await read_body(), ChatBody)
        if body.top_logprobs and body.logprobs is not True:
            raise RequestError("top_logprobs: needs logprobs to be true", field="top_logprobs")
        job = await service.chat_job(body)
        form = ChatForm(text_of(body.messages[-1]) if service.continues(body) else "")
        return await _Answer(service, body, form).answer([job])

    @app.post(prefix + "/v1/chat/completions/input_tokens")
    @app.post(prefix + "/chat/completions/input_tokens")
    async def count_tokens() -> Response:
        body = decode_body(await read_body(), ChatBody)
        tokens = await service.run_blocking(service.encode_chat, body)
        return json_response({"object": "response.input_tokens", "input_tokens": len(tokens)})

    @app.post(prefix + "/v1/completions")
    async def completions() -> Response:
        data = await read_body()
        body = decode_body(data, CompletionBody)
        jobs = await service.completion_jobs(body, len(data))
        return await _Answer(service, body, CompletionForm()).answer(jobs)


class Form(Protocol):
    """How chat and text completions differ."""

    @property
    def id_prefix(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def chunk_kind(self) -> str: ...
    def opening(self) -> dict[str, Any] | None:
        """What a stream's first chunk says before any text."""
        ...

    def piece(self, text: str) -> dict[str, Any]:
        """A piece of the text, as a chunk's choice has it."""
        ...

    def closing(self) -> dict[str, Any]:
        """What stands beside the finish reason."""
        ...

    def whole(self, text: str) -> dict[str, Any]:
        """The whole text, as an answer's choice has it."""
        ...


class ChatForm:
    """A chat completion. `beginning`: what the client gave of the answer, which is part of it."""

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, beginning: str = "") -> None:
        self._beginning = beginning

    def opening(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": self._beginning}}

    def piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def closing(self) -> dict[str, Any]:
        return {"delta": {}}

    def whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": self._beginning + text}}


class CompletionForm:
    """A text completion."""

    id_prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def opening(self) -> dict[str, Any] | None:
        return None

    def piece(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def closing(self) -> dict[str, Any]:
        return {"text": ""}

    def whole(self, text: str) -> dict[str, Any]:
        return {"text": text}


class ChunkWriter:
    """Writes one choice of a streamed answer. The first text shares an event's write with the opening."""

    def __init__(self, form: Form, head: Head, index: int, *, closes_with_timings: bool) -> None:
        self._form = form
        self._head = head
        self._index = index
        self._closes_with_timings = closes_with_timings
        opening = form.opening()
        self._opening = b"" if opening is None else event(self._chunk(opening))
        self._text = TextEvent(self._chunk(form.piece(TextEvent.HOLE)))

    def _chunk(self, content: dict[str, Any], *, reason: str | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": self._index, **content, "logprobs": None, "finish_reason": reason}
        return self._head.chunk([choice], **more)

    def _after_opening(self, chunk: bytes) -> bytes:
        opening, self._opening = self._opening, b""
        return opening + chunk

    def piece(self, item: TokenEvent) -> bytes:
        if not item.text:
            return b""
        chunk = self._text.fill(item.text)
        return self._after_opening(chunk) if self._opening else chunk

    def closing(self, finished: Finished) -> bytes:
        more: dict[str, Any] = {"timings": timings(finished)} if self._closes_with_timings else {}
        chunk = self._chunk(self._form.closing(), reason=finish_reason(finished), **more)
        return self._after_opening(event(chunk))


class DetailedChunkWriter(ChunkWriter):
    """As above, with log probabilities or timings beside each text."""

    def __init__(
        self,
        form: Form,
        head: Head,
        index: int,
        *,
        closes_with_timings: bool,
        tokens: TokenJson | None,
        timed: Generation | None,
    ) -> None:
        super().__init__(form, head, index, closes_with_timings=closes_with_timings)
        self._tokens = tokens
        self._timed = timed

    def piece(self, item: TokenEvent) -> bytes:
        if not item.text and not item.probs:
            return b""
        more: dict[str, Any] = {} if self._timed is None else {"timings": timings(self._timed.progress())}
        chunk = self._chunk(self._form.piece(item.text), **more)
        chunk["choices"][0]["logprobs"] = logprobs_json(self._tokens, item.probs)
        return self._after_opening(event(chunk))


def logprobs_json(tokens: TokenJson | None, reports: Sequence[Choice]) -> dict[str, Any] | None:
    """The log probabilities of a choice, or None when they are not wanted."""
    return None if tokens is None else {"content": tokens.reports(reports)}


class _Answer:
    """One answer, streamed or whole."""

    def __init__(self, service: Service, body: GenerationBody, form: Form) -> None:
        self._service = service
        self._body = body
        self._form = form
        self._tokens = service.token_json(body) if body.probs else None
        """How to write log probabilities; None when they are not wanted."""

    async def answer(self, jobs: Sequence[Job]) -> Response:
        """Starts the jobs and answers. Raises, before a byte is sent, when the first cannot start."""
        if not self._body.stream:
            return json_response(await self._whole(jobs))
        head = self._service.new_head(self._form.id_prefix, self._form.chunk_kind)
        is_wanted = self._body.wants_usage

        def new_writer(index: int, job: Job, generation: Generation) -> ChunkWriter:
            closes_with_timings = index + 1 < len(jobs) or not is_wanted  # else they stand beside the usage
            if self._tokens is None and not self._body.timings_per_token:
                return ChunkWriter(self._form, head, index, closes_with_timings=closes_with_timings)
            return DetailedChunkWriter(
                self._form,
                head,
                index,
                closes_with_timings=closes_with_timings,
                tokens=self._tokens,
                timed=generation if self._body.timings_per_token else None,
            )

        def ending(done: Sequence[Finished]) -> bytes:
            if not is_wanted:
                return DONE
            return event(head.chunk([], usage=usage(done), timings=timings(done[-1]))) + DONE

        interval = self._service.ping_interval(self._body)
        return stream_answer(self._service.starter(), jobs, new_writer, ending, interval)

    async def _whole(self, jobs: Sequence[Job]) -> dict[str, Any]:
        start = self._service.starter()
        results = await collect_all([start(job) for job in jobs])
        head = self._service.new_head(self._form.id_prefix, self._form.kind)
        finished = [result.finished for result in results]
        choices = [self._choice(i, result) for i, result in enumerate(results)]
        return head.chunk(choices, usage=usage(finished), timings=timings(finished[-1]))

    def _choice(self, index: int, result: Completed) -> dict[str, Any]:
        return {
            "index": index,
            **self._form.whole(result.text),
            "logprobs": logprobs_json(self._tokens, result.probs),
            "finish_reason": finish_reason(result.finished),
        }
