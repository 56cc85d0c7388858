"""From a request's body to the engine's Request. Shared by all generating routes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from quart import g

from llamatrio.errors import ContextOverflowError, RequestError
from llamatrio.model.chat import encode_chat
from llamatrio.sched.types import Request, SamplingParams
from llamatrio.server.asgi import held_by_request
from llamatrio.server.ports import Engine, Generation
from llamatrio.server.prompts import Prompt, check_continuation, check_messages, read_logit_bias, read_prompts
from llamatrio.server.results import TokenJson
from llamatrio.server.schemas import ChatBody, CompletionBody, Conversation, GenerationBody, sampling_params
from llamatrio.server.settings import ServerConfig
from llamatrio.server.stream import Head

RunBlocking = Callable[..., Awaitable[Any]]
LONG_BODY = 4096
"""Bytes of a body from which on its prompt is tokenized in a thread."""

_TEMPLATE_ARGUMENTS = frozenset(
    {"template", "tokenizer", "messages", "tools", "add_generation_prompt", "continue_final"}
)


class Job(NamedTuple):
    """One generation to run, and its prompt's text for answers that echo it."""

    request: Request
    prompt: str


Start = Callable[[Job], Generation]


@dataclass(frozen=True)
class Service:
    """What the routes share."""

    engine: Engine
    settings: ServerConfig
    run_blocking: RunBlocking

    def __post_init__(self) -> None:
        """Raises ValueError for default biases of tokens that the model does not have."""
        n_vocab = self.engine.model.tokenizer.n_vocab
        if bad := [id for id, _ in self.settings.sampling.logit_bias if not 0 <= id < n_vocab]:
            raise ValueError(f"expected logit_bias of tokens from 0 to {n_vocab - 1}, not {bad[0]}")

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.settings.alias or self.engine.model.name

    def starter(self) -> Start:
        """What starts jobs for the current request: they are cancelled if it ends before them."""
        held = held_by_request()
        return lambda job: held.enter_context(self.engine.start(job.request))

    def new_head(self, prefix: str, kind: str) -> Head:
        """The head of a new OpenAI answer."""
        return Head(f"{prefix}-{uuid.uuid4().hex}", kind, int(time.time()), self.model_name, build_info())

    def ping_interval(self, body: GenerationBody) -> float:
        """Seconds of silence after which a stream gets a comment; 0 or less means never."""
        wanted = body.sse_ping_interval
        return self.settings.sse_ping_interval if wanted is None else float(wanted)

    def token_json(self, body: GenerationBody) -> TokenJson:
        """How an answer's probabilities are written."""
        after_sampling = body.post_sampling_probs is True
        return TokenJson(self.engine.model.tokenizer, n_top=body.n_top, post_sampling=after_sampling)

    async def completion_jobs(self, body: CompletionBody, n_bytes: int) -> list[Job]:
        """The jobs of a completion, one for each prompt. Raises RequestError and ContextOverflowError."""
        tokenizer = self.engine.model.tokenizer

        def read() -> tuple[list[Prompt], SamplingParams]:
            return read_prompts(body.prompt, tokenizer), self._sampling(body)

        prompts, sampling = await self.run_blocking(read) if n_bytes >= LONG_BODY else read()
        for prompt in prompts:
            self._check_length(len(prompt.tokens))
        return [self._job(body, prompt, sampling) for prompt in prompts]

    async def chat_job(self, body: ChatBody) -> Job:
        """The job of a chat. Raises RequestError, TemplateError and ContextOverflowError."""

        def read() -> tuple[list[int], SamplingParams]:
            return self.encode_chat(body), self._sampling(body)

        tokens, sampling = await self.run_blocking(read)
        if not tokens:
            raise RequestError("messages: the template made an empty prompt of them", field="messages")
        self._check_length(len(tokens))
        return self._job(body, Prompt(tuple(tokens), ""), sampling)

    def encode_chat(self, body: Conversation) -> list[int]:
        """A chat's prompt as ids. Blocking."""
        model = self.engine.model
        return encode_chat(model.chat_template, model.tokenizer, body.messages, **self._template_arguments(body))

    def render_chat(self, body: Conversation) -> str:
        """A chat's prompt as text. Blocking."""
        return self.engine.model.chat_template.render(body.messages, **self._template_arguments(body))

    def continues(self, body: Conversation) -> bool:
        """Whether the last of the messages, which are checked, is the beginning of the answer."""
        is_wanted = self.settings.prefill_assistant or body.continue_final_message is True
        return is_wanted and body.messages[-1]["role"] == "assistant"

    def _template_arguments(self, body: Conversation) -> dict[str, Any]:
        """How the messages are rendered; checks them on the way. Raises RequestError."""
        check_messages(body.messages)
        is_asked = body.continue_final_message is True
        if is_asked and body.add_generation_prompt is True:
            raise RequestError("continue_final_message: excludes add_generation_prompt", field="continue_final_message")
        if is_asked or self.continues(body):
            check_continuation(body.messages)
        effort = effort_variables(body.reasoning_effort)
        variables = {**self.settings.template_variables, **effort, **(body.chat_template_kwargs or {})}
        if taken := _TEMPLATE_ARGUMENTS & variables.keys():
            raise RequestError(f"{min(taken)!r} cannot be set for the template", field="chat_template_kwargs")
        return {
            **variables,
            "add_generation_prompt": body.add_generation_prompt is not False,
            "continue_final": self.continues(body),
        }

    def _sampling(self, body: GenerationBody) -> SamplingParams:
        tokenizer = self.engine.model.tokenizer
        return sampling_params(
            body,
            self.settings.sampling,
            n_probs=min(body.probs, tokenizer.n_vocab),
            logit_bias=read_logit_bias(body.logit_bias, tokenizer),
        )

    def _check_length(self, n_tokens: int) -> None:
        # The engine checks too; here it happens for all prompts of a stream before its first byte.
        if n_tokens >= self.engine.n_ctx_seq:
            raise ContextOverflowError(n_tokens, self.engine.n_ctx_seq)

    def _job(self, body: GenerationBody, prompt: Prompt, sampling: SamplingParams) -> Job:
        request = Request(
            tokens=prompt.tokens,
            sampling=sampling,
            max_tokens=body.token_limit(self.settings.max_tokens),
            stop=body.stop_strings(self.settings.stop),
            cache_prompt=self.settings.cache_prompt if body.cache_prompt is None else body.cache_prompt,
            scope=g.cache_scope,
            lane=self._lane(body.id_slot),
        )
        return Job(request, prompt.text)

    def _lane(self, id_slot: int | None) -> int | None:
        if id_slot is None or id_slot < 0:
            return None
        if id_slot >= self.engine.config.n_parallel:
            raise RequestError(
                f"id_slot: expected a slot below {self.engine.config.n_parallel}, not {id_slot}", field="id_slot"
            )
        return id_slot


def effort_variables(effort: str | None) -> dict[str, Any]:
    """OpenAI's `reasoning_effort` as the variables that templates know."""
    if effort == "none":
        return {"enable_thinking": False}
    return {"reasoning_effort": effort} if effort else {}


def build_info() -> str:
    """Name and version of this server."""
    try:
        return f"llamatrio-{version('llamatrio')}"
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "llamatrio"
