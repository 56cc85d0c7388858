"""Prompts, messages and logit biases in all the forms that clients send, as token ids.

A prompt is a string, a list of ids, a list that mixes strings and ids, an object {"prompt_string": ...}, or a list
of such prompts. Strings are the raw interface: control tokens that they spell out are parsed, and the first piece
of a prompt gets BOS where the model wants it. An empty string is that BOS alone; where the model has none, and for
an empty list, the prompt is refused: there would be nothing to go on from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llamatrio.errors import RequestError
from llamatrio.model.tokenizer import Tokenizer
from llamatrio.sched.types import LARGEST


class Prompt(NamedTuple):
    """A prompt's ids, and the text that answers echo."""

    tokens: tuple[int, ...]
    text: str


def read_prompts(value: Any, tokenizer: Tokenizer) -> list[Prompt]:
    """All prompts of a body's `prompt`. Raises RequestError naming the place."""
    if isinstance(value, list) and value and not any(_is_id_like(item) for item in value):
        if len(value) == 1 and isinstance(value[0], str):
            return [_read_prompt(value[0], tokenizer, "prompt")]
        return [_read_prompt(item, tokenizer, f"prompt[{i}]") for i, item in enumerate(value)]
    return [_read_prompt(value, tokenizer, "prompt")]


def _read_prompt(value: Any, tokenizer: Tokenizer, place: str) -> Prompt:
    if isinstance(value, dict):
        value = _prompt_string(value, place)
    if isinstance(value, str):
        tokens, text = tokenizer.encode(value, add_special=True, parse_special=True), value
    elif isinstance(value, list):
        tokens = read_mixed(value, tokenizer, place, add_special=True, parse_special=True)
        text = tokenizer.decode(tokens, special=True)
    else:
        raise RequestError(f"{place}: expected a string or a list of token ids", field=place)
    if not tokens:
        raise RequestError(f"{place}: the prompt is empty", field=place)
    return Prompt(tuple(tokens), text)


def _prompt_string(value: Mapping[str, Any], place: str) -> Any:
    if value.get("multimodal_data"):
        raise RequestError(f"{place}.multimodal_data: this server does not offer it", field=place)
    return value.get("prompt_string")


def read_mixed(value: Any, tokenizer: Tokenizer, place: str, *, add_special: bool, parse_special: bool) -> list[int]:
    """Ids of a string, or of a list of strings and ids; only the first piece can get BOS."""
    if isinstance(value, str):
        return tokenizer.encode(value, add_special=add_special, parse_special=parse_special)
    if not isinstance(value, list):
        raise RequestError(f"{place}: expected a string or a list of strings and token ids", field=place)
    tokens: list[int] = []
    for i, item in enumerate(value):
        if isinstance(item, str):
            tokens += tokenizer.encode(item, add_special=add_special and i == 0, parse_special=parse_special)
        else:
            tokens.append(read_id(item, tokenizer.n_vocab, f"{place}[{i}]"))
    return tokens


def read_ids(value: Any, n_vocab: int, place: str) -> list[int]:
    """A list of token ids that exist."""
    if not isinstance(value, list):
        raise RequestError(f"{place}: expected a list of token ids", field=place)
    return [read_id(item, n_vocab, f"{place}[{i}]") for i, item in enumerate(value)]


def read_id(value: Any, n_vocab: int, place: str) -> int:
    """A token id that exists."""
    if type(value) is not int:
        raise RequestError(f"{place}: expected a token id, not {_name(value)}", field=place)
    if not 0 <= value < n_vocab:
        raise RequestError(f"{place}: expected a token id from 0 to {n_vocab - 1}, not {value}", field=place)
    return value


def _is_id_like(value: Any) -> bool:
    return isinstance(value, int | float) or value is None


def _name(value: Any) -> str:
    names = {bool: "a boolean", float: "a fraction", list: "a list", dict: "an object", str: "a string"}
    return names.get(type(value), "null")


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises RequestError unless each message has a role and content that is text, whole or in parts."""
    if not messages:
        raise RequestError("messages: expected one message at least", field="messages")
    for i, message in enumerate(messages):
        _check_message(message, f"messages[{i}]")


def check_continuation(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises RequestError unless the last message can be the beginning of the answer."""
    roles = [message["role"] for message in messages[-2:]]
    if roles[-1] != "assistant":
        raise RequestError("continue_final_message: the last message is not the assistant's", field="messages")
    if roles == ["assistant", "assistant"]:
        raise RequestError("messages: expected at most one message of the assistant at the end", field="messages")
    if messages[-1].get("tool_calls"):
        raise RequestError("messages: a message with tool calls cannot be continued", field="messages")


def _check_message(message: Mapping[str, Any], place: str) -> None:
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{place}.role: expected a string", field=f"{place}.role")
    content = message.get("content")
    if isinstance(content, list):
        for i, part in enumerate(content):
            _check_part(part, f"{place}.content[{i}]")
    elif "content" not in message and message["role"] != "assistant":
        raise RequestError(f"{place}.content: the field is required", field=f"{place}.content")
    elif content is not None and not isinstance(content, str):
        raise RequestError(f"{place}.content: expected a string or a list of parts", field=f"{place}.content")


def _check_part(part: Any, place: str) -> None:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise RequestError(f"{place}: expected an object with a type", field=place)
    if part["type"] != "text":
        raise RequestError(f"{place}: this server does not offer parts of type {part['type']!r}", field=place)
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{place}.text: expected a string", field=f"{place}.text")


def read_logit_bias(value: Any, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """Biases by token id, from {"id": bias} or [[id or text, bias], ...]; a bias of false bans the token.

    A text stands for each of its tokens; what is named twice gets the sum.
    """
    if value is None:
        return ()
    if isinstance(value, dict):
        pairs = [(_id_of_key(key), bias, f"logit_bias.{key}") for key, bias in value.items()]
    elif isinstance(value, list):
        pairs = [_pair(item, f"logit_bias[{i}]") for i, item in enumerate(value)]
    else:
        raise RequestError("logit_bias: expected an object or a list of pairs", field="logit_bias")
    biases: dict[int, float] = {}
    for token, bias, place in pairs:
        weight = _read_bias(bias, place)
        for id in _ids_of(token, tokenizer, place):
            biases[id] = biases.get(id, 0.0) + weight
            if not (abs(biases[id]) <= LARGEST or biases[id] == -math.inf):
                raise RequestError(f"{place}: expected biases up to {LARGEST:g}", field=place)
    return tuple(biases.items())


def _id_of_key(key: str) -> int | str | None:
    digits = key.removeprefix("-")
    return int(key) if digits.isascii() and digits.isdigit() and len(digits) < 20 else None


def _pair(item: Any, place: str) -> tuple[Any, Any, str]:
    if not isinstance(item, list) or len(item) != 2:
        raise RequestError(f"{place}: expected a pair of token and bias", field=place)
    return item[0], item[1], place


def _ids_of(token: Any, tokenizer: Tokenizer, place: str) -> list[int]:
    if isinstance(token, str):
        return tokenizer.encode(token, add_special=False, parse_special=False)
    return [read_id(token, tokenizer.n_vocab, place)]


def _read_bias(bias: Any, place: str) -> float:
    if bias is False:
        return -math.inf
    if isinstance(bias, bool) or not isinstance(bias, int | float):
        raise RequestError(f"{place}: expected a number or false as the bias", field=place)
    if not abs(bias) <= LARGEST:  # before float(): an integer may be too long for it
        raise RequestError(f"{place}: expected a bias from {-LARGEST:g} to {LARGEST:g}", field=place)
    return float(bias)
