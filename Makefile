# Two commands do everything: `make demo` and `make test`. Each sets up first what is missing, and nothing twice.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMPS := build/stamps
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# What tests start is compiled once: torch takes a process four CPU seconds to compile, and pip leaves that to its users.
CACHED := PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX="$(CURDIR)/build/bytecode"
# cmake, ninja and clang-format come from pip: nothing of the kind need be on the machine
TOOLS := PATH="$(CURDIR)/$(BIN):$$PATH"

# Under `make -j` ninja looks for the jobs of make, which it is not let near
unexport MAKEFLAGS

NATIVE_SOURCES := $(shell find csrc tests/csrc -name '*.[ch]pp' 2>/dev/null)
CPP_SOURCES := $(NATIVE_SOURCES)
TYPED := infinity io_daemon benchmarks tests

SETUP := $(STAMPS)/setup
BUILD := $(STAMPS)/build
MODULES := $(STAMPS)/modules

.DEFAULT_GOAL := help
.PHONY: help setup build check lint types test test-slow test-gpu test-with demo bench parity-full stress soak mutations sanitize format clean always

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

setup: $(SETUP) ## virtual environment in .venv and missing system packages
$(SETUP): constraints/development.txt constraints/kvikio.txt packaging/system-packages.sh
	@packaging/system-packages.sh $(PYTHON)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setup: installing $$(grep -c == constraints/development.txt) packages into $(VENV)"
	@$(PIP) --quiet install --no-compile --requirement constraints/development.txt
	@$(PIP) --quiet install --no-compile --no-deps --requirement constraints/kvikio.txt || \
	  echo "setup: kvikio is not to be had; its tests will be skipped"
	@mkdir -p $(STAMPS) && touch $@

build: $(BUILD) ## compile csrc/ and install the two packages in place
$(BUILD): $(SETUP) pyproject.toml CMakeLists.txt $(NATIVE_SOURCES) $(MODULES)
	@echo "build: compiling the I/O core"
	@$(TOOLS) $(PIP) install --no-build-isolation --no-deps --editable .
	@mkdir -p $(STAMPS) && touch $@

# An editable install keeps a list of the modules it found: it is made anew when one came, moved or went, and no edit is.
$(MODULES): always
	@mkdir -p $(STAMPS)
	@find infinity io_daemon -name '*.py' | LC_ALL=C sort >$@.now
	@if cmp -s $@.now $@; then rm $@.now; else mv $@.now $@; fi

check: lint types sanitize ## everything that must hold before a commit, without changing a file

lint: $(SETUP) ## ruff and clang-format; `make format` fixes what it can
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "run: make format" >&2; exit 1; }
	@$(BIN)/clang-format --dry-run -Werror $(CPP_SOURCES)

format: $(SETUP) ## the fixing twin of lint
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .
	@$(BIN)/clang-format -i $(CPP_SOURCES)

types: $(BUILD) ## mypy --strict
	@$(BIN)/mypy $(TYPED)

sanitize: $(SETUP) ## the C++ tests under ASan and UBSan, the rings under TSan
	@for kind in address,undefined thread; do \
	  dir=build/sanitize-$${kind%%,*}; \
	  $(TOOLS) cmake -S . -B $$dir -G Ninja --log-level=WARNING -DINFINITY_BUILD_MODULE=OFF -DINFINITY_BUILD_TESTS=ON \
	    -DINFINITY_WERROR=ON -DINFINITY_SANITIZE=$$kind >/dev/null && \
	  $(TOOLS) cmake --build $$dir -- --quiet && \
	  $(TOOLS) ctest --test-dir $$dir --output-on-failure --no-tests=error --quiet || exit 1; \
	done

# Three on CI's two cores: a seventh of the tests' time they wait for a disk, a deadline or another process.
test: $(BUILD) ## the tests that CI runs
	@$(CACHED) $(BIN)/python -m pytest -q -n 3 -m "not slow"

test-slow: $(BUILD) ## the tests that `make test` leaves out
	@$(CACHED) $(BIN)/python -m pytest -q -m slow

test-gpu: $(BUILD) ## on a machine with a GPU: bits, streams and copies there
	@$(CACHED) $(BIN)/python -m pytest -q -n 4 --gpu -m "not slow" tests/gpu tests/infinity/test_parity.py tests/odd tests/io_daemon/bench/test_library_engines.py

test-with: ## the tests with other releases, the newest or WITH="torch==2.9.1 peft<0.21", in build/with (gigabytes)
	@$(PYTHON) -m venv build/with
	@build/with/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager $(WITH) '.[dev]'
	@PATH="$(CURDIR)/build/with/bin:$$PATH" build/with/bin/python -m pip install --quiet --no-build-isolation --no-deps -e .
	@$(CACHED) build/with/bin/python -m pytest -q -n 3 -m "not slow"

demo: $(BUILD) ## train a 100M-parameter GPT from NVMe in a third of its state's memory
	@$(BIN)/infinity demo

bench: $(BUILD) ## memory, predicted steps, and step time beside torch and DeepSpeed (in a virtual environment of its own)
	@$(BIN)/python -m benchmarks.memory
	@$(BIN)/python -m benchmarks.step_prediction
	@$(BIN)/python -m benchmarks.compare --like compare_clipped --plot

parity-full: $(BUILD) ## 624 cells of the parity matrix, as a table
	@$(CACHED) $(BIN)/python -m tests.parity_full

stress: $(BUILD) ## ten million hand-overs through the rings, without a lost wake-up
	@$(TOOLS) cmake -S . -B build/stress -G Ninja --log-level=WARNING -DINFINITY_BUILD_MODULE=OFF \
	  -DINFINITY_BUILD_TESTS=ON >/dev/null
	@$(TOOLS) cmake --build build/stress -- --quiet
	@build/stress/csrc/tests/ring_stress

soak: $(BUILD) ## half an hour of tenants that attach, stream and die at random, every word checked
	@$(BIN)/python -m tests.soak

mutations: $(BUILD) ## how many of 240 small changes to the code its tests see (about 40 minutes)
	@$(TOOLS) $(BIN)/python -m tests.mutations

clean: ## everything that was made, but the virtual environment
	@rm -rf build out .pytest_cache .mypy_cache .ruff_cache .hypothesis io_daemon/_native*.so
	@find infinity io_daemon benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +
