"""Every error llamatrio raises on purpose.

    LlamatrioError
    ├── ModelError                 the file cannot be served
    │   ├── GGUFError              damaged, truncated, foreign or of an unknown version
    │   └── UnsupportedModelError  well formed, but an architecture, tensor type or tokenizer we do not have
    ├── RequestError               400: the client's request is wrong; names the field
    │   ├── ContextOverflowError   400: the prompt does not fit the context
    │   └── TemplateError          400: the chat template refused the messages
    ├── AuthenticationError        401
    ├── NotFoundError              404
    ├── OverloadedError            503: queue full, loading, or shutting down
    └── BackendError               500: a device failed
        └── BackendUnavailableError  no such device or driver here

Misuse of the Python API is a `ValueError`, raised before anything changes; a broken invariant is an
`assert`, never reachable by user input.
"""

from __future__ import annotations


class LlamatrioError(Exception):
    """Base of all. `status` is the HTTP status, `kind` the `error.type` an API client sees."""

    status = 500
    kind = "server_error"


class ModelError(LlamatrioError):
    """The model file cannot be served; the message is one line and names what is wrong."""


class GGUFError(ModelError):
    """The file is damaged, truncated, or not the GGUF this reader knows."""


class UnsupportedModelError(ModelError):
    """The file is well formed but asks for something llamatrio does not implement."""


class RequestError(LlamatrioError):
    """The request is wrong. `field` names the offending field, or is None when it is the whole body."""

    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextOverflowError(RequestError):
    """The prompt has `n_prompt_tokens` tokens; a sequence may hold `n_ctx`."""

    kind = "exceed_context_size_error"

    def __init__(self, n_prompt_tokens: int, n_ctx: int) -> None:
        super().__init__(
            f"the request ({n_prompt_tokens} tokens) exceeds the available context size ({n_ctx} tokens)",
            field="prompt",
        )
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx


class TemplateError(RequestError):
    """The chat template raised; the message holds the template's own words."""


class AuthenticationError(LlamatrioError):
    """No API key, or one that is not configured."""

    status = 401
    kind = "authentication_error"


class NotFoundError(LlamatrioError):
    """No such route, model or slot."""

    status = 404
    kind = "not_found_error"


class OverloadedError(LlamatrioError):
    """The server cannot take the request now."""

    status = 503
    kind = "unavailable_error"


class BackendError(LlamatrioError):
    """A device operation failed."""


class BackendUnavailableError(BackendError):
    """The wanted device or its driver is not present."""
