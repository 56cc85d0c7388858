"""Request bodies: what is accepted, what is refused, and by what name an error calls the field.

Rules. A field that is null counts as absent. Unknown fields are ignored, as llama-server does. A field that would
change the answer in a way that we do not offer is refused unless it asks for nothing: an answer never silently
lacks a constraint that its request had. Numbers are what JSON says: true is not 1, and 1.0 is no integer. What is out
of range is refused, but for the fields that llama-server takes as the nearest value in range (_RANGES).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from llamatrio.errors import RequestError
from llamatrio.sched.types import LARGEST, SamplingParams
from llamatrio.server.samplers import with_samplers

Count = Annotated[int, Meta(ge=0)]
Sane = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
TokenLimit = Annotated[int, Meta(ge=-2)]
MAX_PROBS = 256
"""Most tokens that a position's report may list."""
Probs = Annotated[int, Meta(ge=0, le=MAX_PROBS)]

B = TypeVar("B", bound=Struct)


class StreamOptions(Struct):
    """OpenAI's stream_options."""

    include_usage: bool | None = None


class Unoffered(Struct, kw_only=True):
    """Fields that constrain or multiply the answer in ways that we do not offer."""

    grammar: Any = None
    json_schema: Any = None
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    n: Any = None
    n_cmpl: Any = None
    best_of: Any = None
    echo: Any = None
    suffix: Any = None
    lora: Any = None
    audio: Any = None
    mirostat: Any = None
    dry_multiplier: Any = None
    xtc_probability: Any = None
    typical_p: Any = None
    top_n_sigma: Any = None
    dynatemp_range: Any = None
    adaptive_target: Any = None
    t_max_predict_ms: Any = None
    n_indent: Any = None
    min_keep: Any = None
    reasoning_budget_tokens: Any = None
    thinking_budget_tokens: Any = None


# What asks for nothing, next to null: values, and numbers by what switches llama-server's samplers off.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "grammar": ("",),
    "response_format": ({"type": "text"}, {}),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "echo": (False,),
    "suffix": ("",),
    "lora": ([],),
}
_OFF: dict[str, Callable[[float], bool]] = {
    "n": lambda x: x == 1,
    "n_cmpl": lambda x: x == 1,
    "best_of": lambda x: x == 1,
    "mirostat": lambda x: x <= 0,
    "dry_multiplier": lambda x: x == 0,
    "xtc_probability": lambda x: x <= 0,
    "typical_p": lambda x: x >= 1,
    "top_n_sigma": lambda x: x <= 0,
    "dynatemp_range": lambda x: x <= 0,
    "adaptive_target": lambda x: x < 0,
    "t_max_predict_ms": lambda x: x <= 0,
    "n_indent": lambda x: x <= 0,
    "min_keep": lambda x: x <= 1,
    "reasoning_budget_tokens": lambda x: x < 0,
    "thinking_budget_tokens": lambda x: x < 0,
}


class GenerationBody(Unoffered, kw_only=True):
    """What all generating routes take."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n_predict: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    max_tokens: TokenLimit | None = None
    temperature: Sane | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repeat_penalty: Annotated[float, Meta(ge=1 / LARGEST, le=LARGEST)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1)] | None = None
    presence_penalty: Sane | None = None
    frequency_penalty: Sane | None = None
    logit_bias: Any = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    stop: str | list[str] | None = None
    cache_prompt: bool | None = None
    id_slot: Annotated[int, Meta(ge=-1)] | None = None
    n_probs: Probs | None = None
    logprobs: bool | Probs | None = None
    """A number for text, true or false for chats, as OpenAI has it; each route takes both."""
    post_sampling_probs: bool | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    samplers: str | list[str] | None = None
    sse_ping_interval: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None

    def token_limit(self, default: int) -> int:
        """Most tokens to make; -1 means until the context is full."""
        for limit in (self.n_predict, self.max_completion_tokens, self.max_tokens):
            if limit is not None:
                return max(limit, -1)
        return default

    def stop_strings(self, default: tuple[str, ...]) -> tuple[str, ...]:
        """Strings that end the generation; empty ones mean nothing."""
        if self.stop is None:
            return default
        given = [self.stop] if isinstance(self.stop, str) else self.stop
        return tuple(word for word in given if word)

    @property
    def n_top(self) -> int:
        """How many likely tokens to report at each position."""
        return int(self.logprobs or 0) if self.n_probs is None else self.n_probs

    @property
    def probs(self) -> int:
        """How many to ask the engine for; 0: no report."""
        return self.n_top

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage is True


class CompletionBody(GenerationBody, kw_only=True):
    """POST /completion and /v1/completions."""

    prompt: Any = None
    response_fields: list[str] | None = None


class Conversation(Protocol):
    """The part of a body that becomes a chat's prompt."""

    messages: list[dict[str, Any]]
    chat_template_kwargs: dict[str, Any] | None
    reasoning_effort: str | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


class TemplateBody(Unoffered, kw_only=True):
    """POST /apply-template."""

    messages: list[dict[str, Any]]
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    top_logprobs: Probs | None = None

    @property
    def n_top(self) -> int:
        """`logprobs: true` alone is a report of the tokens made."""
        return self.top_logprobs or 0 if self.logprobs is True else super().n_top

    @property
    def probs(self) -> int:
        """One at least where a report is wanted at all."""
        return max(self.n_top, self.logprobs is True)


class TokenizeBody(Struct, kw_only=True):
    """POST /tokenize."""

    content: Any = ""
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Struct, kw_only=True):
    """POST /detokenize."""

    tokens: Any = msgspec.field(default_factory=list)


def decode_body(data: bytes, kind: type[B]) -> B:
    """The body as `kind`. Raises RequestError naming the field."""
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")  # a byte order mark: some shells write one
        body = msgspec.json.decode(text, type=kind)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: byte {error.start} is wrong") from None
    except msgspec.ValidationError as error:
        raise _wrong_field(error) from None
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    if isinstance(body, Unoffered):
        _refuse_unoffered(body)
    return body


def _wrong_field(error: msgspec.ValidationError) -> RequestError:
    message = str(error)
    if place := re.search(r" - at `\$\.?(.*)`$", message):
        return RequestError(f"{place[1]}: {_lower(message[: place.start()])}", field=place[1])
    if missing := re.match(r"Object missing required field `(.*)`$", message):
        return RequestError(f"{missing[1]}: the field is required", field=missing[1])
    return RequestError(_lower(message))


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def _refuse_unoffered(body: Unoffered) -> None:
    for name in Unoffered.__struct_fields__:
        value = getattr(body, name)
        if value is not None and not _asks_for_nothing(name, value):
            raise RequestError(f"{name}: this server does not offer it", field=name)


def _asks_for_nothing(name: str, value: Any) -> bool:
    if name in _OFF:
        return isinstance(value, int | float) and not isinstance(value, bool) and _OFF[name](value)
    return any(type(value) is type(option) and value == option for option in _NEUTRAL.get(name, ()))


_SAMPLING_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n", "presence_penalty",
    "frequency_penalty", "ignore_eos", "min_tokens", "post_sampling_probs",
)  # fmt: skip

_RANGES = {"temperature": (0.0, LARGEST), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "top_k": (0, math.inf)}
"""llama-server's, of what it brings into range without a word: top_p 1.5 is 1, which leaves all."""


def sampling_params(
    body: GenerationBody, defaults: SamplingParams, *, n_probs: int, logit_bias: tuple[tuple[int, float], ...]
) -> SamplingParams:
    """The body's sampling fields over the server's defaults. A negative seed means a random one.

    Raises RequestError for `samplers` that the chain cannot follow.
    """
    given = {name: getattr(body, name) for name in _SAMPLING_FIELDS if getattr(body, name) is not None}
    for name, (low, high) in _RANGES.items():
        if name in given:
            given[name] = min(max(given[name], low), high)
    if body.seed is not None:
        given["seed"] = body.seed if body.seed >= 0 else None
    if logit_bias:
        given["logit_bias"] = logit_bias
    params = replace(defaults, n_probs=n_probs, **given)
    return params if body.samplers is None else with_samplers(params, body.samplers)
