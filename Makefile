# Two commands do all of their own set-up: `make demo` and `make test`. The rest is for those who work on the code.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test test-all check format proto audit bench chaos soak clean

demo: $(READY)
	@$(BIN)/intarsia demo

# Two processes: one for all that starts Ray or a server, one for the rest (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup

test: $(READY)
	@$(PYTEST) -m "not slow"

test-all: $(READY)
	@$(PYTEST)

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

# A virtual environment with the package and its development tools. Machines without an NVIDIA GPU take the torch
# version named in constraints.txt; GPU machines take the torch that fits their driver.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Intarsia needs Python 3.11 with venv ($(PYTHON) was not found): apt-get install python3.11 python3.11-venv, or: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	@$(PYTHON) -c "import ensurepip" 2>/dev/null || { echo "$(PYTHON) has no venv module: apt-get install python3-venv"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet --quiet $(if $(shell command -v nvidia-smi),,--constraint constraints.txt) --editable ".[dev]"
	@mkdir -p $(VENV)/types && ln -sfn ../.. $(VENV)/types/intarsia  # how pyright finds the package by its name
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
