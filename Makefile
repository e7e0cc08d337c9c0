# make demo    all set-up, then trains a real model on bug-fix tasks in sandboxes and shows what it learned
#              (ARGS="--set run.seed=1" is passed on)
# make test    all set-up, then lint, types and the whole test suite (all but the tests that need a GPU)
# make check   lint, types and the quick tests only: under two minutes
# make setup   the set-up alone, into .venv (PYTHON=python3.12 chooses the Python)
# make clean   removes what builds and tests leave behind; `rm -r .venv models runs` removes the rest

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:
.PHONY: help setup demo test check lint types clean

FOLDERS := buffers sandbox weight_sync losses configs
empty :=
space := $(empty) $(empty)
MODEL := models/smollm2-135m-instruct
BIN := .venv/bin
export PYTHON

help:
	@sed -n 's/^# //p' Makefile

setup:
	@.ci/setup

demo: setup
	@$(BIN)/python -m asyncrl.pretrained $(MODEL)
	@$(BIN)/asyncrl train configs/demo.toml $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

## mypy does not read an editable install's package mapping, so it is shown the tree as it is imported.
types: setup
	@rm -rf build/types && mkdir -p build/types/asyncrl
	@ln -s $(CURDIR)/asyncrl/* $(addprefix $(CURDIR)/,$(FOLDERS)) build/types/asyncrl/
	@echo mypy -p asyncrl
	@MYPYPATH=build/types $(BIN)/mypy -p asyncrl | \
	  sed -E 's#^build/types/asyncrl/($(subst $(space),|,$(FOLDERS)))/#\1/#; s#^build/types/##'

check: lint types
	$(BIN)/python -m pytest -m "not slow and not engine and not gpu"

test: lint types
	$(BIN)/python -m pytest -m "not gpu" --durations=25 --durations-min=5

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find asyncrl $(FOLDERS) tests -name __pycache__ -type d -prune -exec rm -rf {} +
