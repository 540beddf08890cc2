# The whole workflow. Every target does its own set-up; `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(shell \
	$(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: help install engine demo up test test-all soak conformance lint format check-patches check-containers bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## .venv with the package, its extras and the development tools

$(INSTALLED): pyproject.toml
	@if [ -z "$(PYTHON)" ]; then echo "Python 3.11 or newer is missing: install it, or name one: make PYTHON=/path/to/python3" >&2; exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is not Python 3.11 or newer: name one that is: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "$(PYTHON) has no venv module: install it (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@[ -x $(BIN)/python ] || { echo "creating .venv with $(PYTHON)"; $(PYTHON) -m venv .venv; }
	@echo "installing the package and the development tools into .venv"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

engine: install  ## build the patched llama-server into the per-user cache
	@$(BIN)/polykvctl engine build >/dev/null

demo: engine  ## the main job on a real engine and model, beside the same work without pools
	@$(BIN)/polykvctl demo

up: engine  ## engine and proxy in the foreground (MODEL=path.gguf for another model, ARGS=… for polykvctl up)
	@exec $(BIN)/polykvctl up $(if $(MODEL),--model '$(MODEL)') $(ARGS)

# Two workers: real engines in one of them, one at a time; what needs none beside them (tests/conftest.py).
test: install .test-setup  ## every test except the slow ones (ARGS=… for pytest)
	@$(BIN)/python -m pytest -m 'not slow' -n 2 $(ARGS)

test-all: install .test-setup  ## every test (ARGS=… for pytest)
	@$(BIN)/python -m pytest $(ARGS)

soak: install .test-setup  ## thirty minutes of everything at once, and what is left of it (ARGS='--minutes 5' for less)
	@$(BIN)/python -m benchmarks.soak $(ARGS)

conformance: install .test-setup  ## the official clients and llama.cpp's own tests through the proxy (ARGS=… for python -m conformance)
	@$(BIN)/python -m conformance $(ARGS)

# What the engine tests need, built here where it can show its progress.
.PHONY: .test-setup
.test-setup: install
	@$(BIN)/polykvctl engine build >/dev/null
	@$(BIN)/polykvctl engine build --stock >/dev/null
	@$(BIN)/polykvctl model path >/dev/null

lint: install  ## ruff, mypy, import-linter
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: install  ## let ruff format the code
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

check-patches: install  ## apply the patch series without fuzz, export it again, compare byte for byte
	@$(BIN)/polykvctl engine check-patches

bench: install .test-setup  ## the benchmarks, one after the other
	@for script in $$(grep -l '^if __name__ == "__main__"' benchmarks/*.py); do \
		name=$$(basename "$$script" .py); if [ "$$name" = soak ]; then continue; fi; echo "== $$name"; $(BIN)/python -m "benchmarks.$$name"; done

clean:  ## remove .venv and caches of the checkout (the per-user cache stays)
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find polykv_proxy tests benchmarks conformance -name __pycache__ -type d -prune -exec rm -rf {} +

check-containers: install  ## build and run compose.yaml for real (Docker, or podman as root; skipped where neither is)
	@deploy/check-containers
