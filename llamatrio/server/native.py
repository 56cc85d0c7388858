"""llama-server's own routes: completion, tokenizing, templates, and what the server is doing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quart import Response
from quart_trio import QuartTrio

from llamatrio.engine.events import Finished, TokenEvent
from llamatrio.server.asgi import read_body
from llamatrio.server.event_stream import stream_answer
from llamatrio.server.failures import json_response
from llamatrio.server.ports import Generation
from llamatrio.server.prompts import read_ids, read_mixed
from llamatrio.server.results import Completed, collect_all, generation_settings, stop_type, timings
from llamatrio.server.schemas import CompletionBody, DetokenizeBody, TemplateBody, TokenizeBody, decode_body
from llamatrio.server.service import LONG_BODY, Job, Service
from llamatrio.server.stream import event


def add_completion_routes(app: QuartTrio, service: Service) -> None:
    """POST /completion."""
    prefix = service.settings.api_prefix

    @app.post(prefix + "/completion")
    @app.post(prefix + "/completions")
    async def completion() -> Response:
        data = await read_body()
        body = decode_body(data, CompletionBody)
        jobs = await service.completion_jobs(body, len(data))
        return await _Answer(service, body).answer(jobs)


def add_text_routes(app: QuartTrio, service: Service) -> None:
    """POST /tokenize, /detokenize and /apply-template."""
    prefix = service.settings.api_prefix
    tokenizer = service.engine.model.tokenizer

    @app.post(prefix + "/tokenize")
    async def tokenize() -> Response:
        data = await read_body()
        body = decode_body(data, TokenizeBody)

        def read() -> list[Any]:
            ids = read_mixed(
                body.content,
                tokenizer,
                "content",
                add_special=body.add_special is True,
                parse_special=body.parse_special is not False,
            )
            return [_with_piece(id, tokenizer.piece(id, special=True)) for id in ids] if body.with_pieces else ids

        tokens = await service.run_blocking(read) if len(data) >= LONG_BODY else read()
        return json_response({"tokens": tokens})

    @app.post(prefix + "/detokenize")
    async def detokenize() -> Response:
        body = decode_body(await read_body(), DetokenizeBody)
        ids = read_ids(body.tokens, tokenizer.n_vocab, "tokens")
        return json_response({"content": tokenizer.decode(ids, special=True)})

    @app.post(prefix + "/apply-template")
    async def apply_template() -> Response:
        body = decode_body(await read_body(), TemplateBody)
        return json_response({"prompt": await service.run_blocking(service.render_chat, body)})


@dataclass(frozen=True)
class _Answer:
    """One answer, streamed or whole."""

    service: Service
    body: CompletionBody

    async def answer(self, jobs: Sequence[Job]) -> Response:
        """Starts the jobs and answers. Raises, before a byte is sent, when the first cannot start."""
        start = self.service.starter()
        if self.body.stream:
            interval = self.service.ping_interval(self.body)
            return stream_answer(start, jobs, self._new_writer, lambda done: b"", interval)
        results = await collect_all([start(job) for job in jobs])
        answers = [self._whole(i, job, result) for i, (job, result) in enumerate(zip(jobs, results, strict=True))]
        return json_response(answers[0] if len(answers) == 1 else answers)

    def _new_writer(self, index: int, job: Job, generation: Generation) -> CompletionWriter:
        return CompletionWriter(self.service, self.body, index, job, generation)

    def _whole(self, index: int, job: Job, result: Completed) -> dict[str, Any]:
        final = final_json(self.service, self.body, index, job, result.finished, "\n" in result.text)
        final["content"] = result.text
        if self.body.return_tokens:
            final["tokens"] = result.ids
        if self.body.probs:
            final["completion_probabilities"] = self.service.token_json(self.body).reports(result.probs)
        return selected(final, self.body.response_fields)


class CompletionWriter:
    """Writes one generation as llama-server's events."""

    def __init__(self, service: Service, body: CompletionBody, index: int, job: Job, generation: Generation) -> None:
        self._service = service
        self._body = body
        self._index = index
        self._job = job
        self._generation = generation
        self._tokens = service.token_json(body)
        self._n_predicted = 0
        self._has_new_line = False
        self._id_slot: int | None = None
        self._fixed = {
            "index": index,
            "stop": False,
            "tokens_evaluated": len(job.request.tokens),
        }

    def piece(self, item: TokenEvent) -> bytes:
        self._n_predicted += len(item.ids)
        self._has_new_line = self._has_new_line or "\n" in item.text
        if self._id_slot is None:  # known once it runs
            self._id_slot = self._generation.progress().lane
        partial: dict[str, Any] = {
            **self._fixed,
            "id_slot": self._id_slot,
            "content": item.text,
            "tokens": item.ids,
            "tokens_predicted": self._n_predicted,
        }
        if self._body.timings_per_token:
            partial["timings"] = timings(self._generation.progress())
        if self._body.probs:
            partial["completion_probabilities"] = self._tokens.reports(item.probs)
        return event(partial)

    def closing(self, finished: Finished) -> bytes:
        final = final_json(self._service, self._body, self._index, self._job, finished, self._has_new_line)
        return event(selected(final, self._body.response_fields))


def final_json(
    service: Service, body: CompletionBody, index: int, job: Job, finished: Finished, has_new_line: bool
) -> dict[str, Any]:
    """The answer, or a stream's last event, without the text that the events before had."""
    settings = generation_settings(
        job.request,
        stream=body.stream is True,
        timings_per_token=body.timings_per_token is True,
        seed=finished.seed,
    )
    return {
        "index": index,
        "content": "",
        "tokens": [],
        "id_slot": finished.lane,
        "stop": True,
        "model": service.model_name,
        "tokens_predicted": finished.n_predicted,
        "tokens_evaluated": finished.n_prompt,
        "generation_settings": settings,
        "prompt": job.prompt,
        "has_new_line": has_new_line,
        "truncated": False,
        "stop_type": stop_type(finished),
        "stopping_word": finished.stopping_word,
        # Cells that hold the sequence at its end; the last token was made, but not fed back.
        "tokens_cached": finished.n_prompt + max(0, finished.n_predicted - 1),
        "timings": timings(finished),
    }


def selected(answer: dict[str, Any], fields: Sequence[str] | None) -> dict[str, Any]:
    """The fields that `response_fields` asks for, by the names it gives them; "a/b" is b within a."""
    if not fields:
        return answer
    found = {path: _look_up(answer, path.split("/")) for path in fields}
    return {name: value for name, value in found.items() if value is not None}


def _look_up(value: Any, names: Sequence[str]) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _with_piece(id: int, piece: bytes) -> dict[str, Any]:
    try:
        return {"id": id, "piece": piece.decode("utf-8")}
    except UnicodeDecodeError:
        return {"id": id, "piece": list(piece)}
