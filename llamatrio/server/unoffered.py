"""llama-server's routes for what is not there: they say so, rather than that nobody knows them."""

from __future__ import annotations

from quart import Response
from quart_trio import QuartTrio

from llamatrio.server.failures import NotSupportedError, json_response
from llamatrio.server.service import Service

ROUTES = {
    "embeddings": ("/embedding", "/embeddings", "/v1/embeddings"),
    "reranking": ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"),
    "infill": ("/infill",),
    "the responses API": (
        "/responses",
        "/v1/responses",
        "/responses/input_tokens",
        "/v1/responses/input_tokens",
    ),
    "the messages API": ("/v1/messages", "/v1/messages/count_tokens"),
    "audio": ("/v1/audio/transcriptions", "/audio/transcriptions"),
    "cutting a model's reasoning short": ("/v1/chat/completions/control",),
    "taking up streams again": ("/v1/streams/lookup",),
    "LoRA adapters": ("/lora-adapters",),
    "slot files": ("/slots/<int:_slot>",),
    "changing global properties": ("/props",),
}
"""POST routes, by what they are for."""


def add_unoffered_routes(app: QuartTrio, service: Service) -> None:
    """The routes above, and GET /lora-adapters, of which there are none."""
    prefix = service.settings.api_prefix
    for what, paths in ROUTES.items():

        async def refuse(what: str = what, **_: int) -> Response:
            raise NotSupportedError(f"this server does not offer {what}")

        for path in paths:
            app.add_url_rule(prefix + path, f"refuse {path}", refuse, methods=["POST"])

    @app.get(prefix + "/lora-adapters")
    async def adapters() -> Response:
        return json_response([])
