"""Who may call, and from which web pages."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator

from quart import Response, g, request
from quart_trio import QuartTrio
from werkzeug.datastructures import Headers

from llamatrio.errors import AuthenticationError
from llamatrio.server.settings import CorsConfig, ServerConfig

PUBLIC_ROUTES = ("/health", "/v1/health", "/v1/models", "/models")


def scope_of(key: str, salt: bytes = b"") -> str:
    """The name under which this key's cache entries are kept: it tells keys apart and does not tell the key."""
    return hashlib.blake2b(key.encode(), key=salt[:64], person=b"llamatrio-scope", digest_size=16).hexdigest()


class KeyRing:
    """The configured API keys."""

    def __init__(self, keys: Iterable[str], salt: bytes = b"") -> None:
        self._keys = [(_digest(key.encode()), scope_of(key, salt)) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def scope_of(self, offered: Iterable[bytes]) -> str | None:
        """The scope of the first configured key among those offered, or None.

        Compares digests of bytes, in constant time and with every key: neither a key's length nor its place
        among the keys shows in the time, and no input makes the comparison raise.
        """
        found: str | None = None
        for candidate in offered:
            digest = _digest(candidate)
            for key, scope in self._keys:
                if hmac.compare_digest(key, digest) and found is None:
                    found = scope
        return found


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def offered_keys(headers: Headers) -> Iterator[bytes]:
    """The keys in a request's headers, as the bytes that came over the wire, with "Bearer" before them or without."""
    for name in ("Authorization", "X-Api-Key"):
        value = headers.get(name, "").strip()
        scheme, _, token = value.partition(" ")
        if key := token.strip() if scheme.lower() == "bearer" else value:
            yield key.encode("latin-1", "replace")


def add_guards(app: QuartTrio, settings: ServerConfig, *, is_scoped: bool) -> None:
    """Answers preflights, demands a key before the body is read, and sets `g.cache_scope`."""
    keys = KeyRing(settings.api_keys, settings.scope_salt)
    public = {settings.api_prefix + route for route in PUBLIC_ROUTES}

    @app.before_request
    async def check() -> Response | None:
        g.cache_scope = ""
        if request.method == "OPTIONS":
            return Response(b"", 204, preflight_headers(settings.cors, request.headers))
        if keys and request.path not in public:
            scope = keys.scope_of(offered_keys(request.headers))
            if scope is None:
                raise AuthenticationError("Invalid API Key")
            g.cache_scope = scope if is_scoped else ""
        return None

    @app.after_request
    async def allow_origin(response: Response) -> Response:
        for name, value in origin_headers(settings.cors, request.headers).items():
            response.headers[name] = value
        return response


def origin_headers(cors: CorsConfig, headers: Headers) -> dict[str, str]:
    """What every answer to a page on another origin carries."""
    origin = headers.get("Origin")
    is_any = "*" in cors.origins
    if origin is None or not (is_any or origin in cors.origins):
        return {}
    if not cors.credentials:
        return {"access-control-allow-origin": "*"} if is_any else _echo(origin)
    return {**_echo(origin), "access-control-allow-credentials": "true"}


def _echo(origin: str) -> dict[str, str]:
    return {"access-control-allow-origin": origin, "vary": "Origin"}


def preflight_headers(cors: CorsConfig, headers: Headers) -> dict[str, str]:
    """What a preflight is told; the origin comes with every answer."""
    allowed = ", ".join(cors.headers) or headers.get("Access-Control-Request-Headers", "")
    answer = {
        "access-control-allow-methods": ", ".join(cors.methods),
        "access-control-max-age": str(cors.max_age),
    }
    return answer | ({"access-control-allow-headers": allowed} if allowed else {})
