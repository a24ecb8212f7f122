# Each target works from a fresh clone: it makes .venv itself, and does nothing twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
TEST_JOBS ?= auto

.PHONY: help setup demo test lint types format bench docs clean

help:
	@echo "make demo    set up, then a real DSA model answers from a long document on the CPU"
	@echo "make test    set up, then run the tests"
	@echo "make lint    ruff: style and formatting"
	@echo "make types   mypy, strict"
	@echo "make bench   measure this machine: sparse against Transformers' own attention"
	@echo "make docs    build the documentation into site/"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Topkapi needs Python 3.11 or newer; try make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -m topkapi.demo

test: $(STAMP)
	# One thread a worker: the workers share the cores already. Long tests lie side by side in their
	# files, so who is done takes over half of what another has left.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/topkapi bench cpu --vs transformers

docs: $(DOCS_STAMP)
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
