# Everything runs in a private environment, .venv, made on the first call. `make help` lists the targets.

# The first that runs and is of a version we support (a version manager's shim may exist and not run).
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV   := .venv
BIN    := $(VENV)/bin
PORT   ?= 8080
MODEL  ?=
ARGS   ?=
# NVRTC (140 MB) only where a driver is found.
EXTRAS := $(if $(shell ldconfig -p 2>/dev/null | grep -m1 -o libcuda.so.1),[cuda],)

# The model that benches use: MODEL, or the default one, fetched.
BENCH_MODEL = "$(or $(MODEL),$$($(BIN)/python -c 'from llamatrio.model.hub import resolve_model; print(resolve_model(None))'))"

.DEFAULT_GOAL := help
.PHONY: help serve run test test-models test-gpu lint type check bench bench-latency bench-stall bench-peer bench-idle bench-limits bench-large bench-calls kernels-report wheel clean

help:  ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/python: pyproject.toml
	@test -n "$(PYTHON)" || { echo "llamatrio needs Python 3.11, 3.12 or 3.13: none was found; set PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/serve: $(VENV)/python
	@echo "installing llamatrio into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.$(EXTRAS)'
	@touch $@

$(VENV)/test: $(VENV)/python
	@echo "installing llamatrio and its test tools into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cuda,test,dev]'
	@touch $@ $(VENV)/serve

serve: $(VENV)/serve  ## serve a model: MODEL=file.gguf (default: fetch SmolLM2-135M) PORT=8080 ARGS="-np 8"
	@exec $(BIN)/llamatrio serve $(if $(MODEL),-m '$(MODEL)') --port $(PORT) $(ARGS)

test: $(VENV)/test  ## the whole test suite, lint and types included
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q $(ARGS)

test-models: $(VENV)/test  ## tests on real models, which are fetched
	folder=$$($(BIN)/python -m tests.fetch_models | tail -n 1) && \
	LLAMATRIO_TEST_MODELS=$$folder $(BIN)/python -m pytest -q -m model $(ARGS)

test-gpu: $(VENV)/test  ## tests that need a CUDA device
	$(BIN)/python -m pytest -q -m gpu $(ARGS)

lint: $(VENV)/test  ## format and lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

type: $(VENV)/test  ## mypy --strict
	$(BIN)/mypy

bench: $(VENV)/test  ## tokens per second through the engine and through HTTP
	$(BIN)/python -m bench.throughput -m $(BENCH_MODEL) $(ARGS)

bench-latency: $(VENV)/test  ## what HTTP adds to each token
	$(BIN)/python -m bench.latency -m $(BENCH_MODEL) $(ARGS)

bench-stall: $(VENV)/test  ## inter-token gaps while idle slots are saved; LLAMA_SERVER=path adds the peer
	$(BIN)/python -m bench.stall -m $(BENCH_MODEL) $(ARGS)

bench-peer: $(VENV)/test  ## llama-server against llamatrio: LLAMA_SERVER=path
	@test -n "$(LLAMA_SERVER)" || { echo "say which llama-server: make bench-peer LLAMA_SERVER=path"; exit 1; }
	$(BIN)/python -m bench.peer "$(LLAMA_SERVER)" -m $(BENCH_MODEL) $(ARGS)

bench-idle: $(VENV)/test  ## CPU time while nothing runs, and the time of a warm start
	$(BIN)/python -m bench.idle -m $(BENCH_MODEL) $(ARGS)

bench-limits: $(VENV)/test  ## each CPU kernel's share of the machine's limits
	$(BIN)/python -m bench.limits $(ARGS)

bench-large: $(VENV)/test  ## memory, load time and speed of a model of Qwen3-8B's shape (writes 5 GB for a while)
	$(BIN)/python -m bench.large $(ARGS)

bench-calls: $(VENV)/test  ## driver calls of a save, counted on the emulated CUDA driver
	$(BIN)/python -m bench.calls $(ARGS)

kernels-report: $(VENV)/test  ## registers, spills and shared memory of every CUDA kernel (no device needed)
	$(BIN)/python -m bench.kernels_report $(ARGS)

wheel: $(VENV)/test  ## a wheel and a source package, in dist/
	$(BIN)/python -m pip install --quiet build && $(BIN)/python -m build

clean:  ## remove what was built here
	rm -rf $(VENV) dist build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
