# make train    trains on this machine:  make train RECIPE=bf16 ARGS="trainer.max_steps=50 model.num_layers=6"
# make test     runs every check; make test-all also the whole products of options, of which make test meets each pair
# make test-gpu         runs the tests that use one GPU, sixteen at a time; make test does so on a machine with a GPU
# make test-elsewhere   runs the tests of numbers as another CPU computes them
# make test-versions    runs them with the oldest and the newest torch that pyproject.toml allows, each in a venv of its own
# make soak     kills, stops, damages and resumes runs at random:  make soak ARGS="--faults 200 --seed 3"
# make setup    only makes .venv
#
# Each makes .venv by itself when it is missing, or when pyproject.toml or the constraints have changed. A machine with an NVIDIA GPU
# gets the torch and Triton that the kernels have run with (constraints-cuda.txt). torch comes first and alone, so that the name alone
# decides which build it is. On Linux, PyPI's torch is a CUDA build; for the small CPU build:
#     PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make train

VENV := .venv
BIN := $(VENV)/bin
# without a GPU, the run that learns most in a few minutes
RECIPE := $(if $(wildcard /dev/nvidiactl),fp8_delayed,[cpu_demo,fp8_delayed])
ARGS :=
PYTEST_ARGS :=
CONSTRAINTS := constraints.txt constraints-$(if $(wildcard /dev/nvidiactl),cuda,cpu).txt
# tests that measure a GPU's time or power, which means something only while one process uses it
TIMED := tests/gpu/test_health_kernels.py tests/gpu/test_adamw.py tests/gpu/test_power.py
SUITABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
# the interpreter for .venv: make train PYTHON=python3.12
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(SUITABLE)' >/dev/null 2>&1 && echo $$p && break; done)

# another instruction set than this machine's best: other orders of summation, other roundings. It has Inductor's cache to itself:
# code that was compiled for one set is taken from the cache for another, where it does not compile.
ELSEWHERE := TORCHINDUCTOR_CACHE_DIR='$(CURDIR)/$(VENV)/inductor' $(shell grep -qs avx512 /proc/cpuinfo && echo ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 || \
	echo ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41)
NUMBERS := tests/models tests/precision/test_*.py tests/trainer/step tests/trainer/optim tests/trainer/offline \
	tests/trainer/recovery tests/trainer/health/test_health.py
TORCHES := 2.11.0 2.13.0

.PHONY: train test types suite test-all test-gpu test-elsewhere test-versions soak setup
.DELETE_ON_ERROR:

train: $(VENV)/.installed
	$(BIN)/python train.py '+recipe=$(RECIPE)' $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(MAKE) -j 2 types suite
	@if [ -e /dev/nvidiactl ]; then $(MAKE) test-gpu; fi

# pyright keeps one core busy for a minute: beside the suite, not before it
types: $(VENV)/.installed-test
	$(BIN)/pyright

# PYTHONDONTWRITEBYTECODE would have each of a thousand programs compile what it imports; with PYTHONUNBUFFERED none would
# meet at its exit what it could not print
suite: $(VENV)/.installed-test
	PYTHONDONTWRITEBYTECODE= PYTHONUNBUFFERED= OMP_NUM_THREADS=1 $(BIN)/pytest -n auto $(PYTEST_ARGS)

test-all: $(VENV)/.installed-test
	$(MAKE) test PYTEST_ARGS="-m '' $(PYTEST_ARGS)"

# what needs several GPUs is apart: .venv/bin/pytest -n 8 --dist loadfile tests/gpu/parallel
test-gpu: $(VENV)/.installed-test
	$(BIN)/pytest -n 16 --dist worksteal tests/gpu tests/precision/kernels --ignore tests/gpu/parallel $(PYTEST_ARGS)
	$(BIN)/pytest $(TIMED)

test-elsewhere: $(VENV)/.installed-test
	PYTHONDONTWRITEBYTECODE= $(ELSEWHERE) OMP_NUM_THREADS=1 $(BIN)/pytest -n auto $(NUMBERS) $(PYTEST_ARGS)

test-versions:
	@for version in $(TORCHES); do \
		$(PYTHON) -m venv --clear .venv-torch-$$version && \
		sed "/^torch==/d; /^triton==/d" constraints.txt >.venv-torch-$$version/constraints.txt && \
		.venv-torch-$$version/bin/python -m pip install --quiet torch==$$version && \
		.venv-torch-$$version/bin/python -m pip install --quiet -c .venv-torch-$$version/constraints.txt -e '.[test]' && \
		OMP_NUM_THREADS=1 .venv-torch-$$version/bin/pytest -n 2 $(PYTEST_ARGS) || exit 1; \
	done

soak: $(VENV)/.installed
	$(BIN)/python tests/soak $(ARGS)

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
