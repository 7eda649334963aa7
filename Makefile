# `make` alone prints this list.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RIVALS := $(VENV)/.rivals

.DEFAULT_GOAL := help
.PHONY: help setup demo test check slow bench clean

help:  ## print this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */\1\t/' | expand -t 10

setup: $(READY)  ## create .venv and install Themis from the pinned files

# torch comes first and alone: pinned, so that nothing pulls a build with gigabytes of CUDA.
$(READY): pyproject.toml setup.py constraints.txt src/themis/compute/native.c
	$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else "Themis needs Python 3.11 to 3.13: make PYTHON=python3.12")'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,check]'
	touch $(READY)

# What is compared with: attacks and picture operations of other libraries; and trackers with many dependencies.
$(RIVALS): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[attacks,bench,mlflow,wandb]'
	touch $(RIVALS)

demo: $(READY)  ## train LeNet-5 on real digits, test it, draw its faults (about a minute)
	$(BIN)/themis demo

test: $(READY)  ## run the tests (minutes)
	$(BIN)/python -m pytest -n 2 --dist loadgroup

check: $(READY)  ## lint and type-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

slow: $(RIVALS)  ## run the slow tests; those on real data need THEMIS_DATA
	$(BIN)/python -m pytest -m slow
	$(BIN)/python -m pytest -m 'not slow' tests/trackers

bench: $(RIVALS)  ## run the benchmarks and print their tables
	for each in benchmarks/*.py; do echo "== $$each"; $(BIN)/python $$each || exit 1; done

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info src/themis/compute/_native*.so
