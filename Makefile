# `make help` lists the commands. `make profile` and `make test` need only Python 3.10 or later with venv and headers, and
# a C++ compiler. Everything is installed into $(VENV).

VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
# Another package index for torch: https://download.pytorch.org/whl/cpu has it without CUDA, at a tenth of the size.
TORCH_INDEX ?=
PIP_FLAGS ?=
# More flags of pytest: make test PYTEST_FLAGS="-k softplus". With -n0 all tests run in one process.
PYTEST_FLAGS ?=
# Flags of the profile: make profile ARGS="--device cpu".
ARGS ?=
# Notebooks to execute, by default all: make notebooks NOTEBOOKS=1_tour.
NOTEBOOKS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
# A worker per core, at most eight, because each loads torch.
PYTEST := $(BIN)/pytest --timeout=600 --numprocesses auto --maxprocesses 8 --dist worksteal
# What took the time, for make durations.
DURATIONS := build/tests
# Each worker and each isolated test loads tests again, so their bytecode is kept.
unexport PYTHONDONTWRITEBYTECODE
CPP_FILES = $(shell find $(1) -name '*.cpp' -o -name '*.cu' -o -name '*.h' -o -name '*.cuh')
CSRC := $(call CPP_FILES,csrc)
# Stamps are in the environment that they describe, so that removing it removes them.
ENVIRONMENT := $(VENV)/.torch-installed
BUILD := $(VENV)/.memcheck-built
DEVELOPMENT := $(VENV)/.tools-installed
ZOO := $(VENV)/.zoo-installed
# The extension is in the source tree and fits one version of torch, which the stamp names. If another environment has
# built it since, it is built again; unchanged files are not compiled again.
BUILT_FOR := sed -n 's/^TORCH_VERSION = //p' memcheck/_build.py
ifneq ($(shell $(BUILT_FOR) 2>&1),$(shell cat $(BUILD) 2>&1))
.PHONY: $(BUILD)
endif

.DEFAULT_GOAL := help
.PHONY: help profile test test-rest test-nightly test-all test-fast durations ci lint docs bench build-times notebooks asan fuzz check-cuda count-cuda gpu wheels wheel coverage mutants clean

help:  ## Print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

profile: $(BUILD)  ## Install, build, and profile the memory of attention on this machine
	$(BIN)/python -m memcheck.profile_attention $(ARGS)

test: $(BUILD) $(DEVELOPMENT)  ## Run the tests that take less than 2 seconds, one of each slow kind, and some on the host's CUDA
	$(PYTEST) -m "not slow and not ci" --junitxml=$(DURATIONS)/test.xml $(PYTEST_FLAGS)
	$(PYTEST) --host-cuda -m "not slow and not ci" tests/host_cuda/test_kernels.py --junitxml=$(DURATIONS)/test-host-cuda.xml $(PYTEST_FLAGS)

test-rest: $(BUILD) $(DEVELOPMENT) $(ZOO)  ## Run the tests that make test leaves out
	$(PYTEST) -m "(slow or ci) and not nightly" --junitxml=$(DURATIONS)/rest.xml $(PYTEST_FLAGS)
	$(PYTEST) --host-cuda -m "not slow and not ci" tests/ops tests/host_cuda --junitxml=$(DURATIONS)/rest-host-cuda.xml $(PYTEST_FLAGS)

test-nightly: $(BUILD) $(DEVELOPMENT) $(ZOO)  ## Run the tests that CI runs at night: slow combinations, notebooks, benchmarks, wheels, counts of CUDA
	$(PYTEST) -m nightly --junitxml=$(DURATIONS)/nightly.xml $(PYTEST_FLAGS)
	$(PYTEST) --host-cuda -m "not slow and ci" tests/ops tests/host_cuda $(PYTEST_FLAGS)
	$(BIN)/python tests/host_cuda/count.py --check
	MEMCHECK_HOST_CUDA_COUNTS=1 $(PYTEST) --host-cuda tests/host_cuda -k "decoding or memory_is_kept_to and (dense or column)"

test-all: test test-rest test-nightly  ## Run all tests

ci: lint docs test-rest  ## Lint, the documentation, the rest of the tests, other instructions and versions, sanitizers
	$(BIN)/python tests/host_cuda/resources.py
	MEMCHECK_ASAN=1 $(SANITIZED) $(PYTEST) --host-cuda --capture=sys tests/host_cuda -k memory_is_kept_to
	PYTHONPATH=$(NEWER_TRANSFORMERS) $(PYTEST) tests/integrations/test_transformers.py
	grep -q avx512 /proc/cpuinfo || echo "without AVX-512: this processor has none, so all tests ran so"
	! grep -q avx512 /proc/cpuinfo || $(WITHOUT_AVX512) $(PYTEST) -m "not slow and not ci" $(MEASURING) --junitxml=$(DURATIONS)/avx2.xml

# What matrix products take on the CPU depends on its instructions. These tests measure it, and run again as on a processor
# without AVX-512.
MEASURING = $(filter-out tests/predict/test_compiled.py, $(shell grep -lE "measure_memory|predict.compared" tests/predict/test_*.py)) tests/cli/test_models.py tests/measure/test_measurement.py
# Inductor's cache takes kernels of other instructions for these, and they fail, so it has a folder of its own.
WITHOUT_AVX512 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MEMCHECK_CPU=avx2
WITHOUT_AVX512 += TORCHINDUCTOR_CACHE_DIR=$(abspath build/inductor-avx2)

test-fast: $(BUILD) $(DEVELOPMENT)  ## Run the fast tests alone
	$(PYTEST) -m "not slow and not ci and not smoke" --junitxml=$(DURATIONS)/test-fast.xml $(PYTEST_FLAGS)

durations:  ## Print what took the time in the last runs of the tests; ARGS=--write: store which are slow
	$(BIN)/python tests/durations.py $(ARGS)

lint: $(DEVELOPMENT)  ## Check formats, types, layers and common mistakes; changes nothing
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror $(CSRC) $(call CPP_FILES,tests benchmarks)

docs: $(BUILD) $(DEVELOPMENT)  ## Write the figures of the documentation, and build it as a site in build/docs; warnings are errors
	$(BIN)/python docs/figures.py
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs

bench: $(BUILD)  ## Compare every operator with its alternatives, into benchmarks/results/
	@for operator in $(notdir $(wildcard memcheck/ops/[a-z]*.py)) sequences.py; do \
	    if [ -f benchmarks/$$operator ]; then $(BIN)/python benchmarks/$$operator || exit 1; fi; \
	done

build-times: $(BUILD)  ## Time the compilation of each file, into docs/contributing.md
	$(BIN)/python benchmarks/build_times.py

notebooks: $(BUILD) $(DEVELOPMENT)  ## Execute the notebooks in place and draw their pictures; NOTEBOOKS=1_tour: only that one
	$(BIN)/python notebooks/execute.py $(NOTEBOOKS)

# Both libraries are preloaded: with libasan alone, the first exception that leaves torch aborts the process. pytest gets
# --capture=sys, so that a sanitizer's last report reaches stderr.
ASAN := build/asan
SANITIZED = ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
    LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so)"
asan: $(BUILD) $(DEVELOPMENT)  ## Run the operators' tests under AddressSanitizer and UBSan, in a separate build
	MEMCHECK_ASAN=1 MEMCHECK_CUDA=0 $(BIN)/python setup.py -q build --build-lib $(ASAN)
	$(SANITIZED) PYTHONSAFEPATH=1 PYTHONPATH=$(ASAN) \
	    $(BIN)/pytest --timeout=600 tests/ops --capture=sys -m "not slow or not ci" $(PYTEST_FLAGS)

# Cases of the operators in all, twice that of programs for trackers and of torn files.
CASES ?= 20000
fuzz: $(BUILD) $(DEVELOPMENT)  ## Run random cases, others each time: make fuzz CASES=100000; a failure prints the smallest case
	MEMCHECK_FUZZ_CASES=$(CASES) $(PYTEST) --timeout=0 tests/ops/test_random_cases.py tests/measure/test_tracker_random.py \
	    tests/bench/sweep/test_store.py tests/predict/test_operator_facts.py -k "right or apart or budgets or random or torn or byte or vain" $(PYTEST_FLAGS)

check-cuda: $(BUILD) $(DEVELOPMENT)  ## Check CUDA kernels without a GPU: compile with nvcc, run on the host, with sanitizers
	$(BIN)/python tests/host_cuda/resources.py
	MEMCHECK_ASAN=1 $(SANITIZED) $(PYTEST) --host-cuda --capture=sys tests/host_cuda -k "memory_is_kept_to and (float32 or bfloat16)"
	$(PYTEST) --host-cuda -m "not slow and not ci" tests/ops tests/host_cuda $(PYTEST_FLAGS)

count-cuda: $(BUILD) $(DEVELOPMENT)  ## Count the CUDA kernels' work on a GPU, on the host; ARGS=--lines: by line
	$(BIN)/python tests/host_cuda/count.py $(ARGS)
	$(if $(ARGS),,$(BIN)/python tests/host_cuda/count.py --derive)

gpu:  ## Run everything that needs a GPU, with the installed torch, in parts of eight minutes; STEP="times ptx": this part and step
	benchmarks/gpu.sh $(STEP)

wheels:  ## Build a wheel per torch into dist/, and try each without a compiler: make wheels TORCH="2.13.0 2.15.0"
	@for version in $(patsubst torch==%,%,$(TORCH)); do \
	    $(MAKE) wheel TORCH=torch==$$version \
	        VENV=.venv-wheels/$$($(PYTHON) -c 'import sys; print(sys.implementation.cache_tag)')-torch-$$version || exit 1; \
	done

# The folders of modules may hold some that are gone. The second environment has torch and the wheel, and its commands are the only ones on PATH.
EMPTY = $(VENV)-empty
TRY = cd $(EMPTY) && env -i PATH=$(abspath $(EMPTY))/bin HOME="$$HOME"
wheel: $(ENVIRONMENT)
	rm -rf $(VENV)/dist $(EMPTY) build/*/lib.*
	MEMCHECK_LOCAL_VERSION=1 $(PIP) wheel $(PIP_FLAGS) --no-build-isolation --no-deps --wheel-dir $(VENV)/dist .
	$(PYTHON) -m venv $(EMPTY)
	$(EMPTY)/bin/pip install $(PIP_FLAGS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	$(EMPTY)/bin/pip install $(PIP_FLAGS) $(VENV)/dist/*.whl
	$(TRY) memcheck info
	$(TRY) memcheck gradcheck
	$(TRY) memcheck profile-attention
	@mkdir -p dist && cp $(VENV)/dist/*.whl dist/

coverage: $(BUILD) $(DEVELOPMENT)  ## Count the lines of Python that the tests run
	@mkdir -p build/coverage
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest --timeout=1800 -m "not ci" $(PYTEST_FLAGS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

mutants: $(BUILD) $(DEVELOPMENT)  ## Plant known mistakes, and see that tests notice each; ARGS=NAME: only that one
	$(BIN)/python tests/project/mutants.py $(ARGS)

clean:  ## Remove what was built, but not $(VENV)
	rm -rf build dist *.egg-info memcheck/_build.py memcheck/_C.*.so .pytest_cache .mypy_cache .ruff_cache $(BUILD)

$(ENVIRONMENT):
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(PIP_FLAGS) 'setuptools>=70.1' ninja
	$(PIP) install $(PIP_FLAGS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	@touch $@

$(BUILD): $(ENVIRONMENT) pyproject.toml setup.py $(CSRC)
	$(PIP) install $(PIP_FLAGS) --no-build-isolation -e '.[compiled]'
	@$(BUILT_FOR) > $@

$(DEVELOPMENT): pyproject.toml | $(BUILD)
	$(PIP) install $(PIP_FLAGS) --no-build-isolation -e '.[dev]'
	@touch $@

# Packages whose models are predicted, take our attention or train our modules, and ONNX. timm and torchvision ask for another torch, and work with this one.
# Our attentions are tried with the release of transformers in $(NEWER_TRANSFORMERS), too.
NEWER_TRANSFORMERS = $(abspath $(VENV))/transformers-5.24.0
$(ZOO): Makefile | $(DEVELOPMENT)
	$(BIN)/python -c 'import torch; print(f"torch=={torch.__version__}")' > $(VENV)/torch.txt
	$(PIP) install $(PIP_FLAGS) --constraint $(VENV)/torch.txt transformers==5.23.0 accelerate==1.15.0 peft==0.21.2 \
	    lightning==2.6.6 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0
	$(PIP) install $(PIP_FLAGS) --no-deps timm==1.0.31 torchvision==0.29.2
	$(PIP) install $(PIP_FLAGS) --no-deps --upgrade --target $(NEWER_TRANSFORMERS) transformers==5.24.0
	@touch $@
