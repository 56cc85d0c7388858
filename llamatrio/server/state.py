"""What the server is and what it is doing: health, models, properties, slots."""

from __future__ import annotations

from typing import Any

from quart import Response, request
from quart_trio import QuartTrio

from llamatrio.engine.stats import LaneStats
from llamatrio.errors import OverloadedError
from llamatrio.sched.types import Request
from llamatrio.server.failures import NotSupportedError, json_response
from llamatrio.server.results import generation_settings
from llamatrio.server.service import Service, build_info


def add_state_routes(app: QuartTrio, service: Service) -> None:
    """GET /health, /v1/models, /props and /slots."""
    prefix = service.settings.api_prefix

    @app.get(prefix + "/health")
    @app.get(prefix + "/v1/health")
    async def health() -> Response:
        return json_response({"status": "ok"})

    @app.get(prefix + "/v1/models")
    @app.get(prefix + "/models")
    async def models() -> Response:
        return json_response({"models": [_listed_model(service)], "object": "list", "data": [_model_json(service)]})

    @app.get(prefix + "/props")
    async def props() -> Response:
        return json_response(_props_json(service))

    @app.get(prefix + "/slots")
    async def slots() -> Response:
        if not service.settings.slots:
            raise NotSupportedError("This server does not support slots endpoint. Start it with `--slots`")
        lanes = service.engine.stats().lanes
        if request.args.get("fail_on_no_slot") and all(lane.is_processing for lane in lanes):
            raise OverloadedError("no slot available")
        return json_response([_slot_json(lane) for lane in lanes])


def _model_json(service: Service) -> dict[str, Any]:
    model = service.engine.model
    return {
        "id": service.model_name,
        "aliases": [service.model_name],
        "tags": [],
        "object": "model",
        "created": 0,
        "owned_by": "llamatrio",
        "meta": {
            "n_vocab": model.tokenizer.n_vocab,
            "n_ctx": service.engine.n_ctx_seq,
            "n_ctx_train": model.spec.n_ctx_train,
            "n_embd": model.spec.n_embd,
            "n_params": model.n_params,
            "size": model.size_bytes,
        },
    }


def _listed_model(service: Service) -> dict[str, Any]:
    """The model as clients of Ollama expect it."""
    name = service.model_name
    return {
        "name": name,
        "model": name,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [],
        "capabilities": ["completion"],
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": "",
            "families": [],
            "parameter_size": "",
            "quantization_level": "",
        },
    }


def _props_json(service: Service) -> dict[str, Any]:
    engine, settings, tokenizer = service.engine, service.settings, service.engine.model.tokenizer

    def text(id: int | None) -> str:
        return "" if id is None else tokenizer.token_text(id)

    defaults = Request(tokens=(0,), sampling=settings.sampling, max_tokens=settings.max_tokens, stop=settings.stop)
    return {
        "default_generation_settings": {
            "params": generation_settings(defaults),
            "n_ctx": engine.n_ctx_seq,
        },
        "total_slots": engine.config.n_parallel,
        "model_alias": service.model_name,
        "model_path": str(engine.model.path),
        "modalities": {"vision": False, "audio": False, "video": False},
        "endpoint_slots": settings.slots,
        "endpoint_props": False,
        "endpoint_metrics": settings.metrics,
        "ui": False,
        "cors_proxy_enabled": False,
        "chat_template": engine.model.chat_template.source,
        "bos_token": text(tokenizer.bos_id),
        "eos_token": text(tokenizer.eos_id),
        "build_info": build_info(),
        "is_sleeping": False,
    }


def _slot_json(lane: LaneStats) -> dict[str, Any]:
    slot: dict[str, Any] = {
        "id": lane.lane,
        "n_ctx": lane.n_ctx,
        "speculative": False,
        "is_processing": lane.is_processing,
    }
    if lane.params is None:
        return slot
    limit = lane.params.max_tokens
    return {
        **slot,
        "id_task": lane.id,
        "n_prompt_tokens": lane.n_prompt,
        "n_prompt_tokens_processed": lane.n_prompt - lane.n_cached,
        "n_prompt_tokens_cache": lane.n_cached,
        "params": generation_settings(lane.params),
        "next_token": [
            {
                "has_next_token": lane.is_processing,
                "n_remain": -1 if limit < 0 else limit - lane.n_decoded,
                "n_decoded": lane.n_decoded,
            }
        ],
    }
