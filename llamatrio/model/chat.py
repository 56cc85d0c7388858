"""Chat messages to a prompt, by the template that the model's file carries."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from llamatrio.errors import RequestError, TemplateError
from llamatrio.model.chat_environment import MAX_OUTPUT, ChatEnvironment, new_range
from llamatrio.model.metadata import Metadata
from llamatrio.model.stand_ins import StandIns
from llamatrio.model.tokenizer import Tokenizer

log = logging.getLogger(__name__)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Message = Mapping[str, Any]

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "range"})
_PROBE = "probe"


class ChatTemplate:
    """A compiled chat template. May be used from several threads at once.

    `source` None takes ChatML. A template that does not compile is kept as one that refuses every rendering, so
    that a server whose clients need no chat can still run.
    """

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str = "",
        eos_token: str = "",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = CHATML if source is None else source
        self.is_default = source is None
        """The file has no template of its own."""
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self.fault: str | None = None
        """Why the template does not compile; None when it does."""
        self._template = self._compile(now)
        self._takes_text = self._repeats_probe(_PROBE)
        self._takes_parts = self._repeats_probe([{"type": "text", "text": _PROBE}])

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt for `messages` (dictionaries with `role` and `content`, as in the OpenAI API).

        continue_final: the last message is the beginning of the answer: its text stands last, without an end.

        `variables` are the template's own (such as `enable_thinking`). Content as a list of text parts is joined
        for a template that takes strings only, and the other way round.

        Raises:
            TemplateError: the template refused the messages (its own words), failed, or does not compile.
            RequestError: a variable has a reserved name.
        """
        if taken := _RESERVED & variables.keys():
            raise RequestError(f"{min(taken)!r} cannot be set for the template", field="chat_template_kwargs")
        fitted = [self._fit(message) for message in messages]
        beginning = text_of(fitted.pop()) if continue_final else ""
        add_generation_prompt = add_generation_prompt or continue_final
        prompt = self._render(
            {**variables, "messages": fitted, "tools": tools, "add_generation_prompt": add_generation_prompt}
        )
        return prompt + beginning

    def _compile(self, now: Callable[[], datetime]) -> jinja2.Template | None:
        try:
            return ChatEnvironment(now).from_string(self.source)
        except (jinja2.TemplateError, RecursionError, ValueError) as error:
            self.fault = f"the chat template does not compile: {error}"
            return None

    def _render(self, variables: dict[str, Any]) -> str:
        if self._template is None:
            raise TemplateError(str(self.fault), field="messages")
        pieces: list[str] = []
        n_characters = 0
        try:
            for piece in self._template.generate({**self._tokens, **variables, "range": new_range()}):
                pieces.append(piece)
                n_characters += len(piece)
                if n_characters > MAX_OUTPUT:
                    raise TemplateError(f"the chat template wrote more than {MAX_OUTPUT} characters")
        except TemplateError:
            raise
        except Exception as error:
            # Whatever a template does wrong with the messages it is given is for the client to read.
            words = str(error) or type(error).__name__
            raise TemplateError(f"the chat template refused the messages: {words}", field="messages") from error
        return "".join(pieces)

    def _repeats_probe(self, content: object) -> bool:
        """Whether the template writes such content as text, rather than as Python would show it, or not at all."""
        message = {"role": "user", "content": content}
        try:
            written = self._render({"messages": [message], "tools": None, "add_generation_prompt": False})
        except TemplateError:
            return False
        return _PROBE in written and "'text'" not in written and '"text"' not in written

    def _fit(self, message: Message) -> Message:
        """The message as this template takes it. No content is empty content, and a developer is the system."""
        if message.get("content") is None:
            message = {**message, "content": ""}
        if message.get("role") == "developer" and "developer" not in self.source:
            message = {**message, "role": "system"}
        content = message.get("content")
        if isinstance(content, list) and not self._takes_parts and (text := _joined_text(content)) is not None:
            return {**message, "content": text}
        if isinstance(content, str) and self._takes_parts and not self._takes_text:
            return {**message, "content": [{"type": "text", "text": content}]}
        return message


def text_of(message: Message) -> str:
    """A message's text, whatever the form of its content."""
    content = message.get("content")
    return (_joined_text(content) if isinstance(content, list) else content) or ""


def _joined_text(parts: list[Any]) -> str | None:
    """The text of content parts, a line each; None when there are others than text."""
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    return (
        "\n".join(text for text in texts if isinstance(text, str))
        if all(isinstance(text, str) for text in texts)
        else None
    )


def load_template(metadata: Metadata, tokenizer: Tokenizer, given: str | None = None) -> ChatTemplate:
    """The template given, that of a file's metadata, or ChatML; a line in the log says which, and whether it is broken.

    Raises:
        ValueError: the one given does not compile, or is a name other than `chatml`.
    """
    if given is not None and given != "chatml" and "{" not in given:
        raise ValueError(f"expected chat_template to be Jinja text or chatml, not {given!r}")
    own = metadata.string("tokenizer.chat_template") if "tokenizer.chat_template" in metadata else None
    template = ChatTemplate(
        own if given is None else CHATML if given == "chatml" else given,
        bos_token=_text(tokenizer, tokenizer.bos_id),
        eos_token=_text(tokenizer, tokenizer.eos_id),
    )
    if given is not None:
        if template.fault is not None:
            raise ValueError(f"chat_template: {template.fault}")
        log.info("chats use the template given")
    elif template.fault is not None:
        log.warning("%s", template.fault)
    elif template.is_default:
        log.warning("the model has no chat template; chats use ChatML")
    else:
        log.info("chats use the model's own template")
    return template


def _text(tokenizer: Tokenizer, id: int | None) -> str:
    return "" if id is None else tokenizer.token_text(id)


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final: bool = False,
    **variables: Any,
) -> list[int]:
    """Ids of the rendered messages, with exactly one BOS where the model wants one.

    Only control tokens that the template writes become control ids, and likewise user-defined tokens spelled as
    markup (`<|...|>`). Text that came with the request is never one, whatever it spells, while its ids are otherwise
    those of the rendered text as a whole.

    Raises:
        TemplateError: as `ChatTemplate.render`.
        RequestError: a lone surrogate; or nesting too deep to look through.
    """
    stand_ins = StandIns(tokenizer, template.source)
    guarded, guarded_tools, guarded_variables = stand_ins.put([list(messages), tools, variables])
    prompt = template.render(
        guarded,
        tools=guarded_tools,
        add_generation_prompt=add_generation_prompt,
        continue_final=continue_final,
        **guarded_variables,
    )
    ids = tokenizer.encode_parts(stand_ins.split(prompt))
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids
