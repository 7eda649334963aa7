# `make` alone prints this list.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools
RIVALS := $(VENV)/.rivals
# Modules are compiled when they are first imported, which most never are.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
PYTEST := $(BIN)/python -m pytest $(ARGS)
PARALLEL := -n 2 --dist loadgroup
# The tests start many processes: compile each module once, not in each of them.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo quick test portable check slow shape coverage docs dist bench clean

help:  ## print this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */\1\t/' | expand -t 10

setup: $(READY)  ## create .venv and install Themis with the pinned dependencies

# torch comes first and alone: pinned, so that no other package pulls in a build with gigabytes of CUDA.
$(READY): pyproject.toml setup.py constraints.txt src/themis/compute/native.c
	$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else "Themis needs Python 3.11 to 3.13: make PYTHON=python3.12")'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) -e '.[test,check]'
	touch $(READY)

# The documentation, distributions and commit hooks.
$(TOOLS): $(READY)
	$(INSTALL) -e '.[dev]'
	touch $(TOOLS)

# Libraries that Themis is compared with or takes models and data of, trackers with many dependencies, and Ray.
$(RIVALS): $(READY)
	$(INSTALL) -e '.[attacks,bench,coco,mlflow,wandb,integrations,ray]'
	touch $(RIVALS)

demo: $(READY)  ## train LeNet-5 on real digits, test it, draw its faults (seconds after the set-up)
	$(BIN)/themis demo

quick: $(READY)  ## run the tests that matter most (under a minute)
	$(PYTEST) $(PARALLEL) -m quick

test: $(READY)  ## run all tests but the slow ones (minutes)
	$(PYTEST) $(PARALLEL)

portable: $(READY)  ## run the tests as other CPUs, thread counts and Pythons would (an hour)
	$(BIN)/python tests/portable.py

check: $(READY)  ## lint, check types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

slow: $(RIVALS)  ## run the slow tests; those on real data need THEMIS_DATA
	$(PYTEST) -m slow
	$(PYTEST) tests/integrations/trackers tests/target/test_estimator.py tests/data/test_frames.py tests/integrations/test_transforms.py

shape: $(READY)  ## print how heavy the code is: lines, files, parameters, cycles
	$(BIN)/python tools/shape.py

coverage: $(READY)  ## run the tests and print which lines they execute
	$(PYTEST) $(PARALLEL) --cov --cov-report=term

docs: $(TOOLS)  ## build the documentation into site/ and check its links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(TOOLS)  ## build the source distribution and a wheel into dist/
	$(BIN)/python -m build

bench: $(RIVALS)  ## run every benchmark briefly and print its tables (about ten minutes)
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:  ## remove the virtual environment, caches and everything that was built
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage
	rm -rf build dist site htmlcov src/*.egg-info src/themis/compute/_native*.so
