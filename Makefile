# The most important targets are `make demo`, `make test`, `make lint`, `make wheel`, `make bench` and
# `make clean`; `make help` lists all targets. The virtual environment, the pinned dependencies and
# the build are made automatically, and again only if something has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH := .venv-bench
# For `make check-torch`: version of torch, environment, and test suites that depend on torch's tools.
TORCH := 2.14.1
OTHER = .venv-torch-$(TORCH)
TORCH_SUITES := tests/nn tests/optim tests/tables tests/train tests/test_real_models.py \
  tests/test_examples.py $(addprefix tests/ranks/test_,wrappers.py gradient_tools.py fully_shard.py averaging.py trainer.py dropins.py)
# Check for the oldest Python that the pinned requirements support.
CHECK_PYTHON := import sys; sys.version_info >= (3, 11) or \
  sys.exit("make needs Python >= 3.11; name one: make PYTHON=python3.11")
# Output folder of `make bench`. The table in docs/performance.md is made from files of three runs.
RESULTS := build/bench
# Options of `make bench`, such as --quick or --threads 1.
BENCH_OPTIONS :=
# Duration on each backend, and seed, of `make fuzz`. SANITIZE=1 adds AddressSanitizer and UBSan.
SECONDS := 60
SEED := 0
# Files that mark a finished environment and a finished build, each for `make demo` and for all other
# targets. The mark of a build is in the folder of the libraries, so that it is removed together with
# them. There is one such mark at a time; its name tells which parts were left out.
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
BUILT_DEMO := sparsekit/lib/.built-demo
BUILT := sparsekit/lib/.built$(addprefix -cuda,$(SPARSEKIT_CUDA))$(addprefix -simt,$(SPARSEKIT_SIMT))
SOURCES := CMakeLists.txt setup.py version.txt $(shell find csrc -type f)
# Build the CUDA kernels for tests and wheels wherever nvcc is installed. By default, setup.py builds
# them only if there is also a GPU, since they take much longer to compile than everything else.
NVCC := $(firstword $(wildcard $(addsuffix /nvcc,$(subst :, ,$(PATH)) $(CUDA_HOME)/bin $(CUDA_PATH)/bin /usr/local/cuda/bin)))
WITH_CUDA := SPARSEKIT_CUDA=$${SPARSEKIT_CUDA:-$(if $(NVCC),1,0)}

export PATH := $(CURDIR)/$(BIN):$(PATH)
# Let Python write bytecode, which images of containers often disable. The tests start hundreds of
# processes; without bytecode, each compiles the sources of torch again, which takes 5 s of its 7 s.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test systems sanitize fuzz lint format wheel check-wheel check-torch bench cuda-report cuda-sass cuda-counts build clean distclean help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

demo: $(or $(wildcard $(BUILT)),$(BUILT_DEMO)) ## train on MovieLens-100K, next to two baselines
	$(BIN)/python -m sparsekit train $(ARGS)

# Three workers, also on two cores: many tests wait for processes, and two left a fifth of the time unused.
test: build ## run the test suite
	$(BIN)/python -m pytest -n 3 --dist worksteal
	PYTHON=$(BIN)/python tests/other_engines.sh

systems: build ## run the long checks of whole systems; docs/systems.md has their figures
	for each in autoencoder trainer_overhead dlrm_mlperf checkpoint lifecycle serving_quality; do \
	  $(BIN)/python -m benchmarks.systems.$$each || exit 1; done

sanitize: build ## run the CUDA kernels on the host under AddressSanitizer and ThreadSanitizer
	PYTHON=$(BIN)/python tests/sanitize.sh

fuzz: build ## compare random cases of all ops and layers with the reference, SECONDS=60 per backend
ifdef SANITIZE
	PYTHON=$(BIN)/python tests/sanitize.sh --fuzz $(SECONDS) $(SEED)
else
	set -e; for backend in cpu simt; do \
	  $(BIN)/python -m tests.fuzz --backend $$backend --seconds $(SECONDS) --seed $(SEED); done
endif

lint: build ## run ruff, mypy and clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files '*.h' '*.cpp' 'csrc/*.cu' 'csrc/*.cuh')

format: $(READY_DEV) ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files '*.h' '*.cpp' 'csrc/*.cu' 'csrc/*.cuh')

wheel: $(READY_DEV) ## build a wheel into dist/
	rm -rf dist build/lib.* build/bdist.*
	$(WITH_CUDA) $(BIN)/pip wheel --verbose --no-build-isolation --no-deps --wheel-dir dist .
	@ls dist

check-wheel: wheel ## train with the wheel under two versions of torch; downloads both, several GB
	PYTHON=$(PYTHON) tests/wheel_check.sh dist/*.whl

check-torch: build ## run the tests that depend on torch's tools under TORCH=2.14.1; downloads it
	test -x $(OTHER)/bin/pip || $(PYTHON) -m venv $(OTHER)
	sed -E '/^(-r |torch==|nvidia-)/d' requirements.txt requirements-dev.txt > $(OTHER)/requirements.txt
	$(OTHER)/bin/pip install --quiet --no-compile torch==$(TORCH) --requirement $(OTHER)/requirements.txt
	$(OTHER)/bin/python -m pytest -n 2 --dist worksteal $(TORCH_SUITES)

bench: $(BENCH)/.installed ## install all peers, compare kernels with them and with the hardware's limits, plot
	mkdir -p $(RESULTS)
	set -e; for suite in cpu dist curves; do \
	  $(BENCH)/bin/sparsekit bench run --suite $$suite $(BENCH_OPTIONS) --json $(RESULTS)/$$suite.json; done
	$(BENCH)/bin/sparsekit bench plot $(RESULTS)/curves.json --out $(RESULTS)
	$(BENCH)/bin/sparsekit bench table $(RESULTS)/cpu.json $(RESULTS)/dist.json

cuda-report: build ## list registers, spills and shared memory of the CUDA kernels of this build
	$(BIN)/python -m tools.cuda_report

cuda-sass: build ## list loads, stores and atomics of the CUDA kernels in sm_90 machine code
	$(BIN)/python -m tools.cuda_sass

cuda-counts: build ## count launches, waits and bytes of a step, for docs/gpu-status.md
	$(BIN)/python -m tools.cuda_counts --write

build: $(BUILT) ## compile what has changed

$(BUILT): $(READY_DEV) $(SOURCES)
	$(WITH_CUDA) $(BIN)/python setup.py --quiet build_ext --inplace
	@rm -f sparsekit/lib/.built* && touch $@

$(BUILT_DEMO): $(READY) $(SOURCES)
	SPARSEKIT_SIMT=0 $(BIN)/python setup.py --quiet build_ext --inplace
	@rm -f sparsekit/lib/.built* && touch $@

# Without --no-compile, pip would spend two thirds of its time on bytecode, most of which never runs.
$(READY): requirements.txt
	test -x $(BIN)/pip || { $(PYTHON) -c '$(CHECK_PYTHON)' && $(PYTHON) -m venv --clear $(VENV); }
	$(BIN)/pip install --quiet --no-compile --requirement requirements.txt
	@touch $@

# Build before pip does, since pip would hide the progress. Run pip by $(BIN)/python: $(BIN)/pip runs
# python3, which setup.py would take for another environment, and it would compile everything again.
$(READY_DEV): $(READY) requirements-dev.txt requirements-dev-no-deps.txt pyproject.toml
	$(BIN)/pip install --quiet --no-compile --requirement requirements-dev.txt
	$(BIN)/pip install --quiet --no-compile --no-deps --requirement requirements-dev-no-deps.txt
	$(WITH_CUDA) $(BIN)/python setup.py --quiet build_ext --inplace
	$(WITH_CUDA) $(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

# The benchmarks have a separate environment, where sparsekit is built as a user would build it, not
# by `make build`. torchrec requires the CUDA build of fbgemm-gpu, so some packages are installed
# without their dependencies.
$(BENCH)/.ready: requirements-bench.txt requirements-bench-no-deps.txt
	test -x $(BENCH)/bin/pip || $(PYTHON) -m venv --clear $(BENCH)
	$(BENCH)/bin/pip install --quiet --requirement requirements-bench.txt
	$(BENCH)/bin/pip install --quiet --no-deps --requirement requirements-bench-no-deps.txt
	@touch $@

$(BENCH)/.installed: $(BENCH)/.ready $(SOURCES) $(shell find sparsekit -name '*.py')
	rm -rf build/lib.* build/bdist.*
	SPARSEKIT_CUDA=0 $(BENCH)/bin/pip install --quiet --no-build-isolation --no-deps --force-reinstall .
	@touch $@

clean: ## remove the results of the build, but keep the environment
	rm -rf build dist *.egg-info sparsekit/lib sparsekit/include sparsekit/*.so
	find . -name __pycache__ -not -path './$(VENV)*/*' -prune -exec rm -rf {} +

distclean: clean ## remove the results of the build and the environments
	rm -rf $(VENV) $(BENCH) .venv-torch-* .pytest_cache .mypy_cache .ruff_cache .hypothesis
