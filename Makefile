# Each target works from a fresh clone: it makes .venv first, and makes it again when the pins change.
# Another Python: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PINS := $(VENV)/.pins
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

# Two pytest workers with one torch thread each keep two cores busy and never fight over them.
PYTEST := CAPTURE_CACHE=0 OMP_NUM_THREADS=1 $(BIN)/python -m pytest
WORKERS ?= 2

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help test test-gpu demo fuzz bench golden format clean

help:
	@echo 'make demo     a small GPT trains and decodes eagerly and captured: same losses and tokens, speeds, the plan'
	@echo 'make test     formatting, lint, types, tests'
	@echo 'make test-gpu the tests on a GPU, with the torch that is installed there'
	@echo 'make fuzz     the state machine for long (CAPTURE_FUZZ_EXAMPLES=100000)'
	@echo 'make bench    the benchmarks, as ratios to eager'
	@echo 'make golden   write the golden files again; read the diff before you commit it'
	@echo 'make format   format and fix what ruff can fix'
	@echo 'make clean    remove .venv, builds and caches'

$(PINS): requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo 'torch-capture needs Python 3.11 or newer; "$(PYTHON)" is:' "$$($(PYTHON) --version 2>&1)" >&2; \
	  echo 'name another one: make $(MAKECMDGOALS) PYTHON=python3.11' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo '"$(PYTHON)" has no venv module; on Debian: apt-get install python3-venv' >&2; exit 1; }
	@echo 'making $(VENV); this takes a minute the first time' >&2
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install -r requirements-dev.txt
	@touch $@

$(STAMP): $(PINS) pyproject.toml $(wildcard capture/native/*)
	$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

.venv: $(STAMP)

test: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -n $(WORKERS) --dist worksteal

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# On a machine with a GPU and its own torch (>= 2.11): nothing is installed. GPU_PYTHON names its interpreter.
# pytest-benchmark, if it is there, warns beside xdist, and warnings are errors.
GPU_PYTHON ?= python3
GPU_PYTEST := CAPTURE_CACHE=0 OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) $(GPU_PYTHON) -m pytest -p no:benchmark -n 10 --dist worksteal
# The C module is built in place, as an installation would do.
GPU_CONFIG = $(GPU_PYTHON) -c 'import sysconfig; print(sysconfig.get_$(1))'
test-gpu:
	cc -O2 -shared -fPIC -I"$$($(call GPU_CONFIG,path("include")))" capture/native/*.c \
	  -o "capture/_native$$($(call GPU_CONFIG,config_var("EXT_SUFFIX")))" -ldl
	$(GPU_PYTEST) tests/gpu
	CAPTURE_TEST_DEVICE=cuda $(GPU_PYTEST) tests --ignore=tests/gpu --ignore=tests/plan --ignore=tests/rules \
	  --ignore=tests/test_arena.py --ignore=tests/test_layout.py --ignore=tests/test_typing.py

fuzz: $(STAMP)
	CAPTURE_FUZZ_EXAMPLES=$${CAPTURE_FUZZ_EXAMPLES:-100000} $(PYTEST) tests/test_machine.py tests/test_gradients_machine.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks

golden: $(STAMP)
	CAPTURE_UPDATE_GOLDEN=1 $(PYTEST)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist capture/*.so *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
