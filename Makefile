# make train    trains on this machine:  make train RECIPE=bf16 ARGS="trainer.max_steps=50 model.num_layers=6"
# make test     runs every check
# make soak     kills, stops, damages and resumes runs at random, 50 times:  make soak ARGS="--rounds 200 --seed 3 --ranks 2"
# make setup    only makes .venv
#
# Each makes .venv by itself when it is missing, or when pyproject.toml or the constraints have changed. A machine with an NVIDIA GPU
# gets the torch and Triton that the kernels have run with (constraints-cuda.txt). torch comes first and alone, so that the name alone
# decides which build it is. On Linux, PyPI's torch is a CUDA build; for the small CPU build:
#     PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make train

VENV := .venv
BIN := $(VENV)/bin
RECIPE := fp8_delayed
ARGS :=
PYTEST_ARGS :=
CONSTRAINTS := constraints.txt constraints-$(if $(wildcard /dev/nvidiactl),cuda,cpu).txt
# tests that take times of a GPU, which mean something only while one process uses it
TIMED := tests/gpu/test_health_kernels.py tests/gpu/test_adamw.py
SUITABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
# the interpreter for .venv: make train PYTHON=python3.12
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(SUITABLE)' >/dev/null 2>&1 && echo $$p && break; done)

.PHONY: train test soak setup
.DELETE_ON_ERROR:

train: $(VENV)/.installed
	$(BIN)/python train.py +recipe=$(RECIPE) $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 $(PYTEST_ARGS)
	@if [ -e /dev/nvidiactl ]; then $(BIN)/pytest $(TIMED); fi

soak: $(VENV)/.installed
	$(BIN)/python scripts/soak.py $(ARGS)

setup: $(VENV)/.installed-test

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	@if ! $(BIN)/python -c '$(SUITABLE)' >/dev/null 2>&1; then \
		if ! $(or $(PYTHON),false) -c '$(SUITABLE)' >/dev/null 2>&1; then \
			echo 'octet needs Python 3.11, 3.12 or 3.13 with its venv module (Debian and Ubuntu: apt install python3-venv);' \
				'$(if $(PYTHON),$(PYTHON) is not one,none was found): name one with make PYTHON=/path/to/python3.12' >&2; exit 1; \
		fi; \
		echo 'making $(VENV) with $(PYTHON); once, a few minutes' && $(PYTHON) -m venv --clear $(VENV); \
	fi
	$(BIN)/python -m pip install --quiet $(addprefix -c ,$(CONSTRAINTS)) torch
	$(BIN)/python -m pip install --quiet $(addprefix -c ,$(CONSTRAINTS)) -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet $(addprefix -c ,$(CONSTRAINTS)) -e '.[test]'
	@touch $@
