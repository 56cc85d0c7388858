"""Every failure as the JSON that OpenAI's and llama-server's clients expect."""

from __future__ import annotations

import logging
from typing import Any

from quart import Response
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from llamatrio.errors import ContextOverflowError, LlamatrioError, RequestError
from llamatrio.server.stream import to_json

_log = logging.getLogger("llamatrio.http")

_KINDS = {401: "authentication_error", 404: "not_found_error", 503: "unavailable_error"}


class NotSupportedError(LlamatrioError):
    """The route exists, but this server was started without it."""

    status = 501
    kind = "not_supported_error"


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`value` as a JSON answer."""
    return Response(to_json(value), status, headers, content_type="application/json; charset=utf-8")


def error_body(error: LlamatrioError) -> dict[str, Any]:
    """The answer's body for an error of ours."""
    details: dict[str, Any] = {"code": error.status, "message": str(error), "type": error.kind}
    if isinstance(error, RequestError):
        details["param"] = error.field
    if isinstance(error, ContextOverflowError):
        details |= {"n_prompt_tokens": error.n_prompt_tokens, "n_ctx": error.n_ctx}
    return {"error": details}


def add_error_handlers(app: QuartTrio) -> None:
    """Answers every exception of a handler with JSON; what nobody expected is a logged 500."""

    @app.errorhandler(LlamatrioError)
    async def ours(error: LlamatrioError) -> Response:
        headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
        return json_response(error_body(error), error.status, headers)

    @app.errorhandler(HTTPException)
    async def http(error: HTTPException) -> Response:
        code = error.code or 500
        kind = _KINDS.get(code, "invalid_request_error" if code < 500 else "server_error")
        message = "File Not Found" if code == 404 else error.description or error.name
        body = {"error": {"code": code, "message": message, "type": kind}}
        headers = {name: value for name, value in error.get_headers() if name.lower() == "allow"}
        return json_response(body, code, headers)

    @app.errorhandler(Exception)
    async def unexpected(error: Exception) -> Response:
        _log.error("a request failed", exc_info=error)
        body = {"error": {"code": 500, "message": "internal error", "type": "server_error"}}
        return json_response(body, 500)
