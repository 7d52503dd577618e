# Every target works on a fresh clone: the virtual environment is made on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO := .demo
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# compiled modules are kept: the tests start many processes, and pytest rewrites every file for each worker without them
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all gpu-check check docs format clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Stillroom needs Python 3.11 or newer, this is {v[0]}.{v[1]}; run: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@echo 'compiling CPU kernels for this machine'
	@$(BIN)/python -c 'from stillroom.ops import cpu_kernels; cpu_kernels.compile_all()'
	@touch $@

install: $(VENV)/.installed  ## make .venv and install Stillroom with its tools

demo: $(VENV)/.installed  ## index sample documents, ask questions, show citations, sources and reuse
	@BIN=$(BIN) DEMO=$(DEMO) bash examples/demo.sh

test: $(VENV)/.installed  ## the tests a change must pass: offline, without a GPU, minutes
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --hypothesis-profile quick -m 'not slow and not gpu'

test-all: $(VENV)/.installed  ## the slow and statistical checks too
	$(BIN)/pytest

gpu-check: $(VENV)/.installed  ## what needs a GPU, in 25 minutes at most; writes a report under benchmarks/
	$(BIN)/python -m tests.gpu_check

check: $(VENV)/.installed  ## formatting, lint, strict types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.installed  ## the documentation as a site, in build/site
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[docs]'
	$(BIN)/mkdocs build --strict

format: $(VENV)/.installed  ## format and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the virtual environment, caches and the demo's knowledge base
	rm -rf $(VENV) $(DEMO) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache build dist src/*.egg-info
