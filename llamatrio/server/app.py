"""The HTTP API as one ASGI app."""

from __future__ import annotations

import trio
from quart_trio import QuartTrio

from llamatrio.server.asgi import AsgiConnection, HoldingRequest
from llamatrio.server.auth import add_guards
from llamatrio.server.failures import add_error_handlers
from llamatrio.server.metrics import add_metrics_route
from llamatrio.server.native import add_completion_routes, add_text_routes
from llamatrio.server.openai import add_openai_routes
from llamatrio.server.ports import Engine
from llamatrio.server.service import RunBlocking, Service
from llamatrio.server.settings import ServerConfig
from llamatrio.server.state import add_state_routes
from llamatrio.server.unoffered import add_unoffered_routes


class ApiApp(QuartTrio):
    """A Quart app whose requests hold resources."""

    asgi_http_class = AsgiConnection
    request_class = HoldingRequest


def create_app(
    engine: Engine, settings: ServerConfig, *, run_blocking: RunBlocking = trio.to_thread.run_sync
) -> QuartTrio:
    """The API of `engine`. `run_blocking` runs what would block the event loop (templates, long prompts)."""
    app = ApiApp(__name__, static_folder=None)
    app.config.update(
        RESPONSE_TIMEOUT=None,  # Quart's default cuts long streams without a word
        BODY_TIMEOUT=settings.timeout,
        MAX_CONTENT_LENGTH=settings.max_body_bytes,
        PROVIDE_AUTOMATIC_OPTIONS=False,
    )
    service = Service(engine, settings, run_blocking)
    add_guards(app, settings, is_scoped=engine.config.cache_scope == "key")
    add_error_handlers(app)
    add_openai_routes(app, service)
    add_completion_routes(app, service)
    add_text_routes(app, service)
    add_state_routes(app, service)
    add_metrics_route(app, service)
    add_unoffered_routes(app, service)
    return app
