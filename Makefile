# Two commands do everything on a fresh machine with Python 3.11 or newer.
# - `make demo` installs flashtune into .venv, runs a search, and prints the result.
# - `make test` runs the checks that a change must pass. They need no GPU.
# `make help` lists the others.

SHELL := /usr/bin/env bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

PYTHON ?= python3
CONSTRAINTS ?= constraints/torch-2.13.txt
WORKERS ?= 2
# Processes that share a GPU in its tests: most of their time is the compiler's. More threads of theirs than
# there are cores wait for each other for most of it.
GPU_WORKERS ?= 8
# Rendering, compiling and the interpreter are tested under these too, in addition to the installed Triton.
OTHER_TRITONS := 3.6.0 3.9.0
BY_TRITON := tests/templates tests/tuner/binary/test_unwritten.py tests/runtime/launch/test_descriptors.py tests/runtime/launch/test_descriptor_launch.py tests/runtime/launch/test_descriptor_binding.py tests/runtime/launch/test_queueing.py

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
# Modules are found where they are installed, never by chance in the current folder.
export PYTHONSAFEPATH := 1
# Tests start hundreds of processes: each would compile flashtune's modules again.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(PY) -m pytest --quiet

# An installation is redone when what it was made from has changed, whatever the dates of the files say.
SOURCES := pyproject.toml setup.py $(sort $(wildcard constraints/*.txt))
FINGERPRINT := $(shell (echo '$(CURDIR) $(CONSTRAINTS)'; cat $(SOURCES)) | sha256sum | cut -c1-16)
RUNS := $(VENV)/.runs-$(FINGERPRINT)
DEVELOPS := $(VENV)/.develops-$(FINGERPRINT)

.PHONY: help
help: ## List these targets
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

# ---- setting up --------------------------------------------------------------------------------

define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "flashtune needs Python 3.11 or newer and $(PYTHON) is " + sys.version.split()[0] + ": run make PYTHON=python3.12 or another")'
	@$(PY) -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo 'Installing into $(VENV) by $(CONSTRAINTS): the first time takes minutes.'
	@rm -f $(VENV)/.runs-* $(VENV)/.develops-*
	$(PY) -m pip install --quiet --constraint $(CONSTRAINTS) setuptools
	$(PY) -m pip install --quiet --constraint $(CONSTRAINTS) --no-build-isolation --editable '$(1)'
endef

$(RUNS):
	$(call install,.)
	@touch $@

$(DEVELOPS):
	$(call install,.[dev])
	@touch $(RUNS) $@

.PHONY: install develop
install: $(RUNS) ## Install flashtune into .venv
develop: $(DEVELOPS) ## Install it with what tests and checks need

# A folder per Triton, put in front of the installed one by PYTHONPATH.
.triton-%/.complete: | $(DEVELOPS)
	rm -rf $(@D)
	$(PY) -m pip install --quiet --no-deps --target $(@D) triton==$*
	@touch $@

# ---- showing -----------------------------------------------------------------------------------

.PHONY: demo
demo: $(RUNS) ## Search one shape, for an H100 without a GPU, and show it
	@scripts/demo.sh $(BIN)

# ---- checking ----------------------------------------------------------------------------------

# `make test` leaves to `make test-all`: most cases of long lists, most kernels of the shipped tables, and most
# tests under the other Tritons.
CASES := --sample
KERNELS := --sample
UNDER_OTHERS := -m tritons
# CPU seconds of each test, in a file for each run of pytest.
TIMES := out/times

.PHONY: check test test-all slowest
# Runs lists of targets at the same time: static checks use one core for most of their time. The output of a
# list is printed when it ends. The last line names the targets that failed.
STATIC := lint prose lines imports types
define at-once
	+@logs=$$(mktemp -d); export logs; trap 'rm -rf $$logs' EXIT; \
	printf '%s\n' $(1) | xargs -P 2 -I{} bash -c 'for target in {}; do \
		$(MAKE) --no-print-directory KERNELS="$(KERNELS)" $$target || echo $$target >> $$logs/failed; \
	done > $$logs/$$$$ 2>&1; flock $$logs cat $$logs/$$$$'; \
	[ ! -e $$logs/failed ] || { echo "failed: $$(paste -sd' ' $$logs/failed)" >&2; exit 1; }
endef

check: $(DEVELOPS) ## Run the fast checks, while you work
	$(call at-once,'$(STATIC)' quick)

test: no-times static-and-tables unit interpreter other-tritons slowest ## Run what a change must pass before it is merged; needs no GPU

.PHONY: static-and-tables
static-and-tables: $(DEVELOPS)
	$(call at-once,'$(STATIC)' tables)

test-all: CASES := --timeout 3600
test-all: KERNELS :=
test-all: UNDER_OTHERS :=
test-all: export FLASHTUNE_FUZZ := large
test-all: no-times lint prose lines types pyright imports contracts unit interpreter tables other-tritons slowest ## Run every check that needs no GPU, in full

.PHONY: no-times
no-times:
	@rm -rf $(TIMES)

slowest: $(DEVELOPS) ## Print the slowest tests of the last `make test`, by CPU time
	@PYTHONPATH=$(CURDIR) $(PY) -m tests.support.times $(TIMES)/*.tsv

.PHONY: lint format prose lines types pyright imports
lint: $(DEVELOPS) ## Check style and formatting
	$(PY) -m ruff check --quiet
	$(PY) -m ruff format --check --quiet

format: $(DEVELOPS) ## Apply style and formatting
	$(PY) -m ruff check --fix --quiet
	$(PY) -m ruff format --quiet

prose: $(DEVELOPS) ## Check sentences of docs and docstrings
	@PYTHONPATH=$(CURDIR) $(PY) -m scripts.prose

lines: $(DEVELOPS) ## Compare the lines of each package with its budget
	@PYTHONPATH=$(CURDIR) $(PY) -m scripts.lines

types: $(DEVELOPS) ## Check types, with mypy
	$(PY) -m mypy

pyright: $(DEVELOPS) ## Check types, with pyright's rules
	$(PY) -m basedpyright

imports: $(DEVELOPS) ## Check who may import whom
	$(BIN)/lint-imports --no-cache

.PHONY: contracts
contracts: $(DEVELOPS) ## Compare the libraries of integrations with the frozen contracts; needs the network
	@PYTHONPATH=$(CURDIR) $(PY) -m scripts.host_contracts --newest

.PHONY: quick unit interpreter tables other-tritons test-gpu
quick: $(DEVELOPS) ## Run the tests that are fast
	$(PYTEST) -n $(WORKERS) --dist loadgroup -m 'not gpu and not slow' --sample --times $(TIMES)/quick.tsv tests

unit: $(DEVELOPS) ## Run all tests but the interpreter's and the GPU's
	$(PYTEST) -n $(WORKERS) --dist loadgroup -m 'not gpu' $(CASES) --times $(TIMES)/unit.tsv tests

interpreter: $(DEVELOPS) ## Run the kernels on the CPU
	TRITON_INTERPRET=1 $(PYTEST) -n $(WORKERS) --dist loadgroup $(CASES) --times $(TIMES)/interpreter.tsv tests/interpreter

tables: $(DEVELOPS) ## Verify kernels of the shipped tables
	@$(BIN)/flashtune verify $(KERNELS)

other-tritons: $(OTHER_TRITONS:%=triton-%) ## Render, compile and interpret under other Tritons

.PHONY: $(OTHER_TRITONS:%=triton-%)
$(OTHER_TRITONS:%=triton-%): triton-%: .triton-%/.complete
	PYTHONPATH=$(CURDIR)/.triton-$* $(PYTEST) -n $(WORKERS) --dist loadgroup $(UNDER_OTHERS) $(CASES) --times $(TIMES)/triton-$*.tsv $(BY_TRITON)
	PYTHONPATH=$(CURDIR)/.triton-$* TRITON_INTERPRET=1 $(PYTEST) -n $(WORKERS) --dist loadgroup $(UNDER_OTHERS) $(CASES) --times $(TIMES)/interpreter-$*.tsv tests/interpreter

test-gpu: $(DEVELOPS) ## Run the tests that need a GPU
	$(PYTEST) -n $(GPU_WORKERS) --dist worksteal -m 'gpu and not alone' tests
	OMP_NUM_THREADS=$(shell nproc) $(PYTEST) -m 'gpu and alone' tests

# The wheel's kernels are compiled by one version of Triton, whichever is installed. BUNDLE=FILE packs a verified
# bundle instead.
BUNDLE_TRITON := 3.6.0
BUNDLE := out/sm_90.bundle

.PHONY: bundle out/sm_90.bundle
out/sm_90.bundle: .triton-$(BUNDLE_TRITON)/.complete
	@mkdir -p out
	for gpu in h200 h100; do \
		env -u TRITON_PTXAS_PATH PYTHONPATH=$(CURDIR)/.triton-$(BUNDLE_TRITON) \
			$(BIN)/flashtune bundle build --target $$gpu --out out/$$gpu.bundle; \
	done
	$(BIN)/flashtune bundle merge out/h200.bundle out/h100.bundle --out $@

bundle: $(DEVELOPS) $(BUNDLE) ## Pack kernels for Hopper GPUs into a wheel: new ones, or those of BUNDLE=FILE
	@PYTHONPATH=$(CURDIR) $(PY) -m scripts.kernels_wheel $(BUNDLE) --out dist

.PHONY: kernels render-diff reference docs docs-links clean
kernels: $(DEVELOPS) ## Write kernels_generated/, examples of selected kernels
	@PYTHONPATH=$(CURDIR) $(PY) -m scripts.kernels

SPHINX := $(PY) -m sphinx --quiet --fail-on-warning --conf-dir docs .
docs: $(DEVELOPS) ## Build the documentation site, out/site/index.html; broken links between pages are errors
	$(SPHINX) out/site

docs-links: $(DEVELOPS) ## Check the links to other sites; needs the network
	$(SPHINX) --builder linkcheck out/links

BASE ?= main
render-diff: $(DEVELOPS) ## Show how rendered kernels differ from those of BASE, a revision
	@scripts/render_diff.sh $(BASE) $(PY)

reference: $(DEVELOPS) ## Write docs/cli.md from the commands' own help
	@PYTHONPATH=$(CURDIR) $(PY) -m scripts.reference > docs/cli.new
	mv docs/cli.new docs/cli.md

clean: ## Remove what these targets made
	rm -rf $(VENV) .triton-* build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
