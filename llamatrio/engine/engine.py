"""The engine: a model, its device, and the nurseries in which it decodes and saves."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import trio

from llamatrio.backends.base import Backend
from llamatrio.backends.open import open_backend
from llamatrio.config import MIB, EngineConfig
from llamatrio.engine.completion import RunBlocking
from llamatrio.engine.decode import Decoder
from llamatrio.engine.events import Finished
from llamatrio.engine.generation import Generation
from llamatrio.engine.saver import CopyThread, Saver
from llamatrio.engine.staging import StagingPool
from llamatrio.engine.stats import EngineStats, LaneStats, Totals
from llamatrio.errors import ContextOverflowError, LlamatrioError, OverloadedError, RequestError
from llamatrio.kv.cells import KVCells
from llamatrio.kv.node import RestoreTicket, SaveTicket
from llamatrio.kv.prompt_cache import PromptCache
from llamatrio.model.model import Model, open_model
from llamatrio.sched.pace import Pace
from llamatrio.sched.scheduler import Limits, Scheduler
from llamatrio.sched.stops import MAX_STOP
from llamatrio.sched.text import TextAssembler
from llamatrio.sched.types import PIECE, Request, SamplingParams, least_rows

_log = logging.getLogger("llamatrio.engine")

_REQUEST_FIELDS = {f.name for f in fields(Request)}
_SAMPLING_FIELDS = {f.name for f in fields(SamplingParams)}
_CONFIG_FIELDS = {f.name for f in fields(EngineConfig)}


class Engine:
    """Runs requests on one model. Made by `open_engine`; its methods are called from the Trio thread."""

    def __init__(self, model: Model, backend: Backend, config: EngineConfig) -> None:
        self.model = model
        self.config = config
        self.n_ctx = backend.n_cells
        self.n_ctx_seq = config.n_ctx_seq(self.n_ctx)
        self.device = backend.device
        self._backend = backend
        self._totals = Totals()
        self._cells = KVCells(backend.n_cells, config.n_parallel, self.n_ctx_seq)
        self._cache = PromptCache(self._cells, backend.layout.record_bytes, config.cache_bytes)
        limits = Limits(
            n_vocab=model.spec.n_vocab,
            n_parallel=config.n_parallel,
            n_ctx_seq=self.n_ctx_seq,
            n_batch=min(_raised("n_batch", config.n_batch, least_rows(config.n_parallel)), backend.max_rows),
            n_ubatch=min(_raised("n_ubatch", config.n_ubatch, PIECE), backend.max_rows),
            eog_ids=model.tokenizer.eog_ids,
            save_when_idle=config.cache_idle_slots,
        )
        self._scheduler = Scheduler(self._cells, self._cache, limits, Pace(config.target_itl_ms / 1000))
        self._decoder: Decoder | None = None
        """None before the engine is open and after it was closed."""

    def start(self, request: Request) -> Generation:
        """Queues a request.

        Raises:
            RequestError: a token id or a lane does not exist, or the prompt is empty.
            ContextOverflowError: the prompt leaves no room for a token.
            OverloadedError: too many requests wait, or the engine is closing.
        """
        if self._decoder is None:
            raise OverloadedError("the server is shutting down")
        self._check(request)
        seed = request.sampling.seed
        if seed is None:
            seed = self.config.seed if self.config.seed is not None else secrets.randbits(32)
        decoder = self._decoder
        assembler = TextAssembler(request.stop)  # before the sequence: what fails here leaves none without a reader
        seq = self._scheduler.add(request, seed, trio.current_time())
        generation = Generation(seq, assembler, decoder.cancel, decoder.wake)
        decoder.generations[seq.id] = generation
        decoder.wake()
        return generation

    async def generate(self, prompt: str | Sequence[int], **options: Any) -> AsyncIterator[str]:
        """The continuation of a prompt, piece by piece.

        options are fields of Request (max_tokens, stop, ...) and of SamplingParams (temperature, seed, ...).

        Raises:
            ValueError: an option does not exist.
            LlamatrioError: as `start`, or the device failed.
        """
        with self.start(self.request(prompt, **options)) as generation:
            async for event in generation:
                if not isinstance(event, Finished):
                    if event.text:
                        yield event.text
                elif event.error:
                    raise LlamatrioError(event.error)

    def request(self, prompt: str | Sequence[int], **options: Any) -> Request:
        """A Request for a prompt (text is tokenized as raw text, special tokens included) and options by name."""
        if unknown := options.keys() - _REQUEST_FIELDS - _SAMPLING_FIELDS:
            raise ValueError(f"expected options of Request or SamplingParams, not {', '.join(sorted(unknown))}")
        if isinstance(prompt, str):
            prompt = self.model.tokenizer.encode(prompt, add_special=True, parse_special=True)
        sampling = {name: value for name, value in options.items() if name in _SAMPLING_FIELDS}
        rest = {name: value for name, value in options.items() if name in _REQUEST_FIELDS}
        request = Request(tuple(prompt), **rest)
        return replace(request, sampling=replace(request.sampling, **sampling))

    def stats(self) -> EngineStats:
        """A snapshot of what runs and of everything counted."""
        scheduler, cache, cells, totals = self._scheduler, self._cache, self._cells, self._totals
        return EngineStats(
            lanes=self._lanes(),
            n_waiting=len(scheduler.waiting),
            cells_total=cells.n_cells,
            cells_used=cells.n_used,
            cells_idle=cache.n_idle_cells,
            cells_pinned=cells.n_pinned,
            cache_bytes=cache.used_bytes,
            cache_entries=cache.n_entries,
            cache_limit_bytes=cache.budget_bytes,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            prompt_seconds=totals.prompt_seconds,
            predicted_tokens=totals.predicted_tokens,
            predicted_seconds=totals.predicted_seconds,
            n_decode_steps=scheduler.n_steps,
            n_tokens_max=totals.n_tokens_max,
            n_preempted=scheduler.n_preempted,
            saves=cache.counters.saves,
            save_bytes=cache.counters.save_bytes,
            save_seconds=totals.save_seconds,
            restores=cache.counters.restores,
            restore_bytes=cache.counters.restore_bytes,
            restore_seconds=totals.restore_seconds,
            hits=cache.counters.hits,
            misses=dict(cache.counters.misses),
            itl=totals.itl.snapshot(),
            ttft=totals.ttft.snapshot(),
        )

    def _lanes(self) -> tuple[LaneStats, ...]:
        lanes = [LaneStats(lane, n_ctx=self.n_ctx_seq) for lane in range(self.config.n_parallel)]
        for seq in self._scheduler.running:
            if seq.lane is not None and not seq.is_finished:
                lanes[seq.lane] = LaneStats(
                    seq.lane, True, seq.id, self.n_ctx_seq, seq.n_prompt, seq.n_cached, seq.n_predicted, seq.request
                )
        return tuple(lanes)

    def _check(self, request: Request) -> None:
        n_vocab = self.model.spec.n_vocab
        if not request.tokens:
            raise RequestError("expected a prompt of at least one token", field="prompt")
        biased = [token for token, _ in request.sampling.logit_bias]
        for field, ids in (("prompt", request.tokens), ("logit_bias", biased)):
            if bad := [token for token in ids if not 0 <= token < n_vocab]:
                raise RequestError(f"expected token ids from 0 to {n_vocab - 1}, not {bad[0]}", field=field)
        if self._bans_all(request.sampling):
            raise RequestError("expected a token that is not banned", field="logit_bias")
        if sum(map(len, request.stop)) > MAX_STOP:
            raise RequestError(f"expected at most {MAX_STOP} characters of stop strings", field="stop")
        if request.lane is not None and not 0 <= request.lane < self.config.n_parallel:
            raise RequestError(
                f"expected a slot from 0 to {self.config.n_parallel - 1}, not {request.lane}", field="id_slot"
            )
        if len(request.tokens) >= self.n_ctx_seq:
            raise ContextOverflowError(len(request.tokens), self.n_ctx_seq)
        if len(self._scheduler.waiting) >= self.config.max_queued:
            raise OverloadedError(f"{len(self._scheduler.waiting)} requests are waiting; try again later")

    def _bans_all(self, sampling: SamplingParams) -> bool:
        banned = {token for token, bias in sampling.logit_bias if bias == -math.inf}
        if banned and (sampling.ignore_eos or sampling.min_tokens > 0):
            banned |= set(self.model.tokenizer.eog_ids)
        return len(banned) >= self.model.spec.n_vocab

    @asynccontextmanager
    async def _running(self, run_blocking: RunBlocking, run_copy: RunBlocking) -> AsyncIterator[None]:
        """The nurseries: savers outside, decoding inside, so that a decode crash takes everything down, and on the
        way out nothing is begun that nobody waits for. An error of the block itself passes as it is, not in a group."""
        staging = await run_blocking(self._allocate_staging)
        block_error: Exception | None = None
        async with trio.open_nursery() as saver_nursery:
            saver = Saver(
                self._backend,
                self._cache,
                staging,
                self._totals,
                run_copy=run_copy,
                on_restored=lambda ticket, ok: self._scheduler.finish_restore(ticket, ok=ok),
                wake=lambda: decoder.wake(),
            )

            def begin(ticket: SaveTicket | RestoreTicket) -> None:
                saver_nursery.start_soon(saver.carry_out, ticket)

            decoder = Decoder(
                self._backend,
                self._scheduler,
                self._totals,
                piece=self.model.tokenizer.piece,
                begin=begin,
                stall_timeout=self.config.stream_stall_timeout,
            )
            async with trio.open_nursery() as decode_nursery:
                decode_nursery.start_soon(decoder.run)
                self._decoder = decoder
                try:
                    yield
                except Exception as error:
                    block_error = error
                finally:
                    self._decoder = None
                    decoder.close()
            # The host tier ends with the process, so a save that is still under way has no reader to come.
            saver_nursery.cancel_scope.cancel()
        if block_error is not None:
            raise block_error

    def _allocate_staging(self) -> StagingPool | None:
        if not self._backend.needs_staging:
            return None
        n_records = max(1, self.config.staging_mib * MIB // self._backend.layout.record_bytes)
        n_records = min(n_records, self._backend.n_cells)
        return StagingPool([self._backend.new_staging(n_records) for _ in range(self.config.n_staging)])


def _raised(name: str, wanted: int, least: int) -> int:
    """The least that lets every prompt start, where less is wanted."""
    if wanted < least:
        _log.warning("%s %d is too small for a piece of a prompt beside all streams: %d is used", name, wanted, least)
    return max(wanted, least)


@asynccontextmanager
async def open_engine(
    model: str | Path | Model,
    config: EngineConfig | None = None,
    *,
    backend: Backend | None = None,
    run_blocking: RunBlocking = trio.to_thread.run_sync,
    run_copy: RunBlocking | None = None,
    **options: Any,
) -> AsyncIterator[Engine]:
    """Opens a model for serving; leaving the block ends every request, then the device.

    model: a GGUF file, or one that is open already (and stays open, with the template it has). options are fields of
    EngineConfig.
    backend, run_blocking and run_copy are for tests: a device to use, and how blocking work is run.

    Raises:
        ValueError: an option does not exist or is out of range.
        ModelError: the file cannot be served.
        BackendError: the device is not there or has too little memory.
    """
    if unknown := options.keys() - _CONFIG_FIELDS:
        raise ValueError(f"there is no option {min(unknown)!r}")
    config = replace(config or EngineConfig(), **options)
    with ExitStack() as stack:
        if isinstance(model, str | Path):
            opened: Model = await run_blocking(open_model, model, config.chat_template)
            stack.callback(opened.close)
        else:
            opened = model
        if backend is None:
            device: Backend = await run_blocking(stack.enter_context, open_backend(opened, config))
        else:
            device = backend
            stack.callback(device.close)
        copier = stack.enter_context(CopyThread())
        engine = Engine(opened, device, config)
        async with engine._running(run_blocking, run_copy or copier.run):
            yield engine
