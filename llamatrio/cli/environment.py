"""llama-server's environment variables. Each stands for a flag; what the command line says goes before them."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping

from llamatrio.cli.accepted import ACCEPTED_VARIABLES

_log = logging.getLogger("llamatrio")

_VALUES = {
    "MODEL": "model", "HF_REPO": "hf_repo", "HF_FILE": "hf_file", "CTX_SIZE": "ctx_size", "N_PARALLEL": "parallel",
    "CACHE_TYPE_K": "cache_type_k", "CACHE_TYPE_V": "cache_type_v", "BATCH": "batch_size", "UBATCH": "ubatch_size",
    "THREADS": "threads", "N_GPU_LAYERS": "gpu_layers", "DEVICE": "device", "CACHE_RAM": "cache_ram",
    "HOST": "host", "PORT": "port", "ALIAS": "alias", "API_KEY_FILE": "api_key_file", "API_PREFIX": "api_prefix",
    "SSL_KEY_FILE": "ssl_key_file", "SSL_CERT_FILE": "ssl_cert_file", "SSE_PING_INTERVAL": "sse_ping_interval",
    "TIMEOUT": "timeout", "CORS_ORIGINS": "cors_origins", "CORS_METHODS": "cors_methods",
    "CORS_HEADERS": "cors_headers", "N_PREDICT": "predict", "TEMPERATURE": "temp", "TOP_K": "top_k", "TOP_P": "top_p",
    "MIN_P": "min_p", "REPEAT_PENALTY": "repeat_penalty", "PRESENCE_PENALTY": "presence_penalty",
    "FREQUENCY_PENALTY": "frequency_penalty", "CHAT_TEMPLATE": "chat_template",
    "CHAT_TEMPLATE_FILE": "chat_template_file", "CHAT_TEMPLATE_KWARGS": "chat_template_kwargs",
    "LOG_FILE": "log_file", "LOG_VERBOSITY": "verbosity",
}  # fmt: skip
"""Name after LLAMA_ARG_ -> where argparse keeps the flag's value."""
_SWITCHES = {
    "KV_UNIFIED": "kv_unified", "CACHE_IDLE_SLOTS": "cache_idle_slots", "CACHE_PROMPT": "cache_prompt",
    "ENDPOINT_METRICS": "metrics", "ENDPOINT_SLOTS": "slots", "CORS_CREDENTIALS": "cors_credentials",
    "LOG_TIMESTAMPS": "log_timestamps", "OFFLINE": "offline", "PREFILL_ASSISTANT": "prefill_assistant",
}  # fmt: skip
_WORDS = {"on": True, "enabled": True, "true": True, "1": True, "off": False, "disabled": False, "false": False,
          "0": False}  # fmt: skip


def take_defaults(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    """Makes LLAMA_ARG_*, LLAMA_API_KEY and HF_TOKEN the defaults of the flags they stand for.

    LLAMA_ARG_NO_X turns the switch of LLAMA_ARG_X off, whatever its value. A variable of a feature that is not there
    is named in the log and ignored. Raises ValueError for a switch that is neither on nor off.
    """
    defaults: dict[str, object] = {}
    for name, value in environment.items():
        key = name.removeprefix("LLAMA_ARG_")
        if key == name or name in ACCEPTED_VARIABLES:
            continue
        if key in _VALUES:
            defaults[_VALUES[key]] = value
        elif key in _SWITCHES:
            defaults.setdefault(_SWITCHES[key], _read_switch(name, value))
        elif key.removeprefix("NO_") in _SWITCHES:
            defaults[_SWITCHES[key.removeprefix("NO_")]] = False
        elif key.removeprefix("NO_") == key or "LLAMA_ARG_" + key.removeprefix("NO_") not in ACCEPTED_VARIABLES:
            _log.warning("%s: llamatrio has no such setting", name)
    if keys := environment.get("LLAMA_API_KEY"):
        defaults["api_key"] = [keys]
    if token := environment.get("HF_TOKEN"):
        defaults["hf_token"] = token
    parser.set_defaults(**defaults)


def _read_switch(name: str, value: str) -> bool:
    if value not in _WORDS:
        raise ValueError(f"expected {name} to be one of {', '.join(_WORDS)}, not {value!r}")
    return _WORDS[value]
