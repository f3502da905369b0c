# Everything on a fresh Linux machine with Python 3.11, 3.12 or 3.13: `make quickstart`, `make test`.
# Another interpreter: make PYTHON=/path/to/python3.11 setup

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# the first one that starts (a pyenv shim may not) and can make environments
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	2>/dev/null && { echo $$python; break; }; done)

.PHONY: help setup slurm quickstart test gpu check format lock soak clean

help: ## Say what can be made
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/\1\t\2/' | expand -t 14

setup: $(STAMP) ## Install the pinned environment into .venv

$(STAMP): requirements/cpu.lock requirements/dev.lock pyproject.toml
	@if [ -z "$(PYTHON)" ]; then \
		echo "No Python 3.11, 3.12 or 3.13 with venv and ensurepip was found."; \
		echo "Debian: apt-get install python3 python3-venv. Elsewhere: make PYTHON=/path/to/python3.11 setup"; \
		exit 1; \
	fi
	$(PYTHON) -m venv $(VENV)
	@echo "installing $$(cat requirements/{cpu,dev}.lock | grep -c ==) packages into $(VENV): some minutes, and 3 GB"
	@$(BIN)/pip install --disable-pip-version-check --no-deps -r requirements/dev.lock \
		| sed -un 's/^Collecting \([^ ]*\).*/  \1/p; s/^\(Installing collected packages\).*/\1/p'
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	@# an index without the CPU build gives the CUDA one, which needs its libraries
	@$(BIN)/python -c 'import torch' 2>/dev/null \
		|| $(BIN)/pip install --disable-pip-version-check "$$(grep '^torch==' requirements/cpu.lock)"
	@# compiled once here: every process of every run would compile in vain where .venv is read-only;
	@# some packages carry templates that are not Python, hence `|| true`
	@echo "compiling them"
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib hpc_rlhf >/dev/null || true
	touch $@

slurm: ## Install Slurm, munge and MariaDB for the sandbox (apt, as root)
	tools/slurm_sandbox install

quickstart: setup ## The main job on this machine: warm-up, then GRPO, on real parts
	$(BIN)/hpc-rlhf run experiment=quickstart

# Those of Slurm mostly wait for it: they run beside the others, and are printed after them.
test: setup slurm ## All tests but those of GPUs, none of which may be skipped; PYTEST_ARGS chooses some
ifeq ($(strip $(PYTEST_ARGS)),)
	@export CUDA_VISIBLE_DEVICES=; log=$$(mktemp); failed=0; \
	$(BIN)/python -m pytest --forbid-skips -m 'slurm and not soak' >$$log 2>&1 & slurm=$$!; \
	trap 'kill $$slurm 2>/dev/null || true; rm -f $$log' EXIT; \
	$(BIN)/python -m pytest --forbid-skips -m 'not slurm and not soak' || failed=$$?; \
	wait $$slurm || failed=$$?; \
	cat $$log; exit $$failed
else
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest --forbid-skips $(PYTEST_ARGS)
endif

gpu: ## Tests and measurements on one GPU, in the environment that PYTHON is of
	$(PYTHON) -m pytest -s -m gpu tests/gpu $(PYTEST_ARGS)
	$(PYTHON) -m tools.bench_learner --lengths equal
	$(PYTHON) -m tools.bench_learner --lengths ragged --all
	$(PYTHON) -m tools.bench_checkpoint --gpu --dtype bf16 --hidden 2048 --layers 16

check: setup ## Lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## Format, and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

soak: setup slurm ## The long tests (hours)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest --forbid-skips -m soak $(PYTEST_ARGS)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -m gpu --gpu-tests-on-cpu tests/gpu

lock: ## Pin what is in .venv now
	$(BIN)/python tools/lock.py

clean: ## Remove build products and caches; .venv and runs stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find hpc_rlhf tests tools -name __pycache__ -prune -exec rm -rf {} +
