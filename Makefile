# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DIST := dist
# Files in the packages are dated by the last commit, so that the same source gives the same bytes.
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 1704067200)
export SOURCE_DATE_EPOCH

.PHONY: help install demo test lint dist clean

help:
	@echo "make demo     install, train on long-tailed digits, show the result"
	@echo "make test     install, lint, check types, run the tests"
	@echo "make dist     build the wheel and the source package, byte for byte the same every time"
	@echo "make install  create $(VENV) with the development extras"
	@echo "make clean    remove $(VENV), caches and the demo's files"

install: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "longtail needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: install
	@rm -rf demo
	$(BIN)/longtail train digits-lt --out demo/digits
	$(BIN)/longtail evaluate demo/digits

test: install lint
	$(BIN)/pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

dist: install
	@rm -rf $(DIST)
	$(BIN)/python -m build --no-isolation --outdir $(DIST)

clean:
	rm -rf $(VENV) demo $(DIST) .mypy_cache .pytest_cache .ruff_cache .hypothesis
