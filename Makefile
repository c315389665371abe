# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_VENV := .venv-demo
DEMO_BIN := $(DEMO_VENV)/bin
DEMO_READY := $(DEMO_VENV)/.ready
DIST := dist
# Files in the packages are dated by the last commit, so that the same source gives the same bytes.
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 1704067200)
export SOURCE_DATE_EPOCH
# Installed without bytecode; the first import writes it, or every process would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo test lint docs dist clean constraints results-quick

help:
	@echo "make demo     small environment $(DEMO_VENV), train on long-tailed digits, calibrate, draw a report"
	@echo "make test     install, lint, check types, run the tests"
	@echo "make dist     build the wheel and the source package, byte for byte the same every time"
	@echo "make results-quick   stage-two tables of long-tailed CIFAR from the released networks; CIFAR=FOLDER, or ../shared"
	@echo "make install  create $(VENV) with the development extras"
	@echo "make docs     build the documentation site in site/"
	@echo "make clean    remove $(VENV), $(DEMO_VENV), caches and the demo's files"

PIP_INSTALL = pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt

# $(call environment,FOLDER,WHAT): a new environment with WHAT in it.
define environment
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "longtail needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(1)
	$(1)/bin/$(PIP_INSTALL) --editable '$(2)'
endef

install: $(READY)

# timm and torchvision stand in a folder of their own, which tests alone look into: PyPI's torchvision is built for CUDA,
# and beside a torch for the CPU it would keep every library that looks for it from being imported.
$(READY): pyproject.toml constraints.txt
	$(call environment,$(VENV),.[dev])
	$(BIN)/$(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/vision torchvision timm \
		|| echo "torchvision and timm could not be installed: their tests are skipped"
	@touch $@

# The demo needs the library and its report alone, a fraction of what development needs.
$(DEMO_READY): pyproject.toml constraints.txt
	$(call environment,$(DEMO_VENV),.[report])
	@touch $@

# The network is tiny: more threads would only wait for each other.
demo: export OMP_NUM_THREADS = 1
demo: $(DEMO_READY)
	@rm -rf demo
	$(DEMO_BIN)/longtail train digits-lt --out demo/digits
	$(DEMO_BIN)/longtail calibrate demo/digits
	$(DEMO_BIN)/longtail report demo/digits
	@echo
	@echo "calibrated model: demo/digits/halo     look at: demo/digits/report/index.html     figures: demo/digits/report/figures"

test: install lint
	$(BIN)/pytest --numprocesses auto --dist loadfile

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "look at: site/index.html"

# Nothing is trained. Without CIFAR= the images come from $$LONGTAIL_SHARED or ../shared.
results-quick: install
	$(BIN)/python benchmarks/cifar_lt.py $(if $(CIFAR),--root $(CIFAR)) --out runs/results-quick
	@echo "look at: runs/results-quick"

dist: install
	@rm -rf $(DIST)
	$(BIN)/python -m build --no-isolation --outdir $(DIST)

# Kept versions: a release of another project must not decide whether the tests pass.
constraints: install
	@{ head -n 2 constraints.txt; { $(BIN)/pip freeze --exclude-editable; $(BIN)/pip freeze --path $(VENV)/vision; } \
		| sed 's/+.*//' | sort --unique --ignore-case; } > constraints.new && mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) $(DEMO_VENV) demo site $(DIST) .mypy_cache .pytest_cache .ruff_cache .hypothesis
