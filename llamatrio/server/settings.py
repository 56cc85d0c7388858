"""How the HTTP side runs. The command line fills this; nothing here reads the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llamatrio.sched.types import SamplingParams

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class CorsConfig:
    """What browsers on other origins may do.

    With credentials the caller's origin is echoed, since `*` must not stand next to Allow-Credentials.
    """

    origins: tuple[str, ...] = ("*",)
    methods: tuple[str, ...] = ("GET", "POST", "OPTIONS")
    headers: tuple[str, ...] = ()
    """Request headers allowed; empty allows those that the preflight asks for."""
    credentials: bool = False
    max_age: int = 600
    """Seconds that a browser may keep the preflight's answer."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Names and meanings follow llama-server's flags where it has one. Times are in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    """One address or several, divided by commas."""
    port: int = 8080
    """0 takes a free port."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Any of these opens the door; none set leaves it open."""
    ssl_cert_file: str | None = None
    ssl_key_file: str | None = None
    scope_salt: bytes = field(default=b"", repr=False)
    """Mixed into the cache scopes derived from the keys; keep it where cached entries outlive the process."""
    alias: str | None = None
    """The model's name in answers; None takes the file's own."""
    api_prefix: str = ""
    """Path that all routes start with, as "/llm"; no slash at its end."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """What a request gets that does not say."""
    max_tokens: int = -1
    """Likewise; -1: until the context is full."""
    stop: tuple[str, ...] = ()
    cache_prompt: bool = True
    prefill_assistant: bool = True
    """A chat whose last message is the assistant's is continued within that message."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Likewise, for chat templates: a request's own go before these."""
    metrics: bool = False
    slots: bool = True
    sse_ping_interval: float = 30.0
    """A comment is sent on a stream that was silent for this long; 0 or less sends none."""
    cors: CorsConfig = CorsConfig()
    timeout: float = 3600.0
    """A request's body must arrive within this time."""
    grace: float = 30.0
    """After shutdown began, streams may go on for this long."""
    keep_alive: float = 75.0
    """An idle connection is closed after this time; longer than the usual client keeps one."""
    handshake_timeout: float = 10.0
    write_timeout: float = 60.0
    """A peer that takes nothing for this long loses its connection (or its HTTP/2 stream)."""
    max_body_bytes: int = 64 * MIB
    max_streams: int = 512
    """HTTP/2 streams at once on one connection."""
    backlog: int = 1024

    def __post_init__(self) -> None:
        if (self.ssl_cert_file is None) != (self.ssl_key_file is None):
            raise ValueError("expected ssl_cert_file and ssl_key_file together, not one of them")
        if self.api_prefix and (not self.api_prefix.startswith("/") or self.api_prefix.endswith("/")):
            raise ValueError(f"expected api_prefix as '/prefix', not {self.api_prefix!r}")
        if "" in self.api_keys:
            raise ValueError("expected API keys that are not empty")
        if self.max_tokens < -1:
            raise ValueError(f"expected max_tokens >= -1, not {self.max_tokens}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"expected a port from 0 to 65535, not {self.port}")
        for name in ("grace", "keep_alive", "handshake_timeout", "write_timeout", "timeout"):
            if getattr(self, name) < 0:
                raise ValueError(f"expected {name} >= 0, not {getattr(self, name)}")

    @property
    def tls(self) -> bool:
        """Whether the listeners speak TLS."""
        return self.ssl_cert_file is not None
