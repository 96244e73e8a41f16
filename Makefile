# The two commands of the README are `make demo` and `make test`. Each first makes .venv if it is not there yet.
#
#   make PYTHON=python3.12 test     another interpreter for a new .venv (3.10 to 3.13)
#   make JOBS=8 test                more test processes
#   make PYTEST="-k ring" test      more arguments for pytest
#   make BENCH="--help" bench       arguments for the benchmark; the result goes to benchmarks/results unless --out says

PYTHON ?= python3
JOBS ?= 2
PYTEST ?=
BENCH ?=

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test lint format gpu-test bench clean

help:  ## show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(READY)  ## with a Hopper GPU: run, compare, time. Without: run on the emulator, check, draw, inspect
	$(PY) -m fa3.demo

test: lint  ## everything that this machine can check: lint, types, unit, compile, notebooks; GPU tests where there is one
	$(PY) -m pytest -n $(JOBS) --dist worksteal $(PYTEST)

lint: $(READY)  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(READY)  ## let ruff rewrite what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

gpu-test: $(READY)  ## only the tests that need a Hopper GPU
	$(PY) -m pytest tests/gpu $(PYTEST)

bench: $(READY)  ## time fa3 beside every installed peer, in one run, and write benchmarks/results/<gpu>-...-<day>.json
	$(PY) -m benchmarks.run --out $(BENCH)

clean:  ## remove caches and build products; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find fa3 tests benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is younger than the files that say what to install, or the installation runs (again).
$(READY): pyproject.toml constraints.txt tools/make_venv.py
	$(PYTHON) tools/make_venv.py $(VENV)
	@touch $@
