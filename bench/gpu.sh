#!/usr/bin/env bash
# Everything that only a GPU can show, in under 8 minutes: the tests of backends on the device, rates beside the
# device's own copy rate, and the stall scenario. The last line is JSON.
#
#   PYTHON=python3 MODEL=model.gguf OUT=bench/results/gpu.json bench/gpu.sh
#
# Needs a driver and Python packages: numpy, cuda-python, nvidia-cuda-nvrtc, gguf. What else is missing is skipped,
# and the line says so.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$(test -x .venv/bin/python && echo .venv/bin/python || echo python3)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

tests="skipped: no pytest"
if "$PYTHON" -c 'import pytest, pytest_timeout' 2>/dev/null; then
    log=$(mktemp)
    timeout 150 "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider tests/backends 2>&1 | tee "$log" || true
    tests=$(tail -n 1 "$log")
fi

extra=()
if "$PYTHON" -c 'import trio, hypercorn, quart_trio, tokenizers' 2>/dev/null; then extra+=(--stall); fi
if [ -n "${MODEL:-}" ]; then extra+=(-m "$MODEL"); fi
if [ -n "${OUT:-}" ]; then extra+=(--out "$OUT"); fi
exec timeout 300 "$PYTHON" -m bench.gpu --tests "$tests" "${extra[@]}"
