# Everything a person needs: `make demo`, `make test`, `make lint`, `make wheel`, `make bench`,
# `make clean`. Set-up (virtual environment, pinned dependencies, build) happens by itself and is
# not repeated when nothing has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH := .venv-bench
# The torch of `make check-torch`, its environment, and the suites that depend on torch's own tools.
TORCH := 2.14.1
OTHER = .venv-torch-$(TORCH)
TORCH_SUITES := tests/nn tests/optim tests/train tests/test_real_models.py tests/test_examples.py \
  $(addprefix tests/ranks/test_,wrappers.py gradient_tools.py fully_shard.py averaging.py trainer.py dropins.py)
# The oldest that the pinned requirements have.
CHECK_PYTHON := import sys; sys.version_info >= (3, 11) or \
  sys.exit("make needs Python >= 3.11; name one: make PYTHON=python3.11")
# Where `make bench` writes; files of three runs make the table of docs/performance.md.
RESULTS := build/bench
# Such as --quick or --threads 1.
BENCH_OPTIONS :=
# Of `make fuzz`, on each backend. SANITIZE=1 runs it under AddressSanitizer and UBSan.
SECONDS := 60
SEED := 0
# The environment and the build, in two steps: what `make demo` needs, then what all else needs. Marks
# of a build lie beside the libraries, so that they go when those do; there is one at a time, and its
# name says what was left out of the build.
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
BUILT_DEMO := sparsekit/lib/.built-demo
BUILT := sparsekit/lib/.built$(addprefix -cuda,$(SPARSEKIT_CUDA))$(addprefix -simt,$(SPARSEKIT_SIMT))
SOURCES := CMakeLists.txt setup.py version.txt $(shell find csrc -type f)
# Tests and wheels have the CUDA kernels wherever there is an nvcc; left to itself, setup.py asks for a
# GPU too, since they take many times as long to compile as all else.
NVCC := $(firstword $(wildcard $(addsuffix /nvcc,$(subst :, ,$(PATH)) $(CUDA_HOME)/bin $(CUDA_PATH)/bin /usr/local/cuda/bin)))
WITH_CUDA := SPARSEKIT_CUDA=$${SPARSEKIT_CUDA:-$(if $(NVCC),1,0)}

export PATH := $(CURDIR)/$(BIN):$(PATH)
# Tests start some hundred processes and a run one for each rank. Where bytecode is not kept, as images
# of containers like to have it, each compiles the sources of torch anew: 5 s of its 7.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test systems sanitize fuzz lint format wheel check-wheel check-torch bench cuda-report cuda-sass cuda-counts build clean distclean help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

demo: $(or $(wildcard $(BUILT)),$(BUILT_DEMO)) ## train on MovieLens-100K, next to two baselines
	$(BIN)/python -m sparsekit train $(ARGS)

test: build ## run the test suite
	$(BIN)/python -m pytest -n 2 --dist worksteal
	PYTHON=$(BIN)/python tests/other_engines.sh

systems: build ## run the long checks of whole systems, whose figures are in docs/systems.md
	for each in autoencoder trainer_overhead dlrm_mlperf checkpoint; do \
	  $(BIN)/python -m benchmarks.systems.$$each || exit 1; done

sanitize: build ## run the CUDA kernels on the host under AddressSanitizer and ThreadSanitizer
	PYTHON=$(BIN)/python tests/sanitize.sh

fuzz: build ## random cases of every op and layer against the reference, for SECONDS=60 each way
ifdef SANITIZE
	PYTHON=$(BIN)/python tests/sanitize.sh --fuzz $(SECONDS) $(SEED)
else
	set -e; for backend in cpu simt; do \
	  $(BIN)/python -m tests.fuzz --backend $$backend --seconds $(SECONDS) --seed $(SEED); done
endif

lint: build ## ruff, mypy and clang-format
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

check-wheel: wheel ## train with that wheel under two torches; downloads both, several GB
	PYTHON=$(PYTHON) tests/wheel_check.sh dist/*.whl

check-torch: build ## run what depends on torch's tools under another one, TORCH=2.14.1; downloads it
	test -x $(OTHER)/bin/pip || $(PYTHON) -m venv $(OTHER)
	sed -E '/^(-r |torch==|nvidia-)/d' requirements.txt requirements-dev.txt > $(OTHER)/requirements.txt
	$(OTHER)/bin/pip install --quiet --no-compile torch==$(TORCH) --requirement $(OTHER)/requirements.txt
	$(OTHER)/bin/python -m pytest -n 2 --dist worksteal $(TORCH_SUITES)

bench: $(BENCH)/.installed ## install all peers, time the kernels against them and the roofs, plot
	mkdir -p $(RESULTS)
	set -e; for suite in cpu dist curves; do \
	  $(BENCH)/bin/sparsekit bench run --suite $$suite $(BENCH_OPTIONS) --json $(RESULTS)/$$suite.json; done
	$(BENCH)/bin/sparsekit bench plot $(RESULTS)/curves.json --out $(RESULTS)
	$(BENCH)/bin/sparsekit bench table $(RESULTS)/cpu.json $(RESULTS)/dist.json

cuda-report: build ## registers, spills and shared memory of the CUDA kernels of this build
	$(BIN)/python -m tools.cuda_report

cuda-sass: build ## their loads, stores and atomics in sm_90 machine code
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

# Without --no-compile pip spends two thirds of its time on bytecode of which little is ever run.
$(READY): requirements.txt
	test -x $(BIN)/pip || { $(PYTHON) -c '$(CHECK_PYTHON)' && $(PYTHON) -m venv --clear $(VENV); }
	$(BIN)/pip install --quiet --no-compile --requirement requirements.txt
	@touch $@

# Not $(BIN)/pip, which runs python3: setup.py would take that for another environment and compile
# everything once more. Built before pip does it, which would hide the progress.
$(READY_DEV): $(READY) requirements-dev.txt requirements-dev-no-deps.txt pyproject.toml
	$(BIN)/pip install --quiet --no-compile --requirement requirements-dev.txt
	$(BIN)/pip install --quiet --no-compile --no-deps --requirement requirements-dev-no-deps.txt
	$(WITH_CUDA) $(BIN)/python setup.py --quiet build_ext --inplace
	$(WITH_CUDA) $(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

# An environment of its own, with sparsekit built as a user would: what is timed is not the build of
# `make build`. torchrec asks for the CUDA fbgemm-gpu, so some come without what they depend on.
$(BENCH)/.ready: requirements-bench.txt requirements-bench-no-deps.txt
	test -x $(BENCH)/bin/pip || $(PYTHON) -m venv --clear $(BENCH)
	$(BENCH)/bin/pip install --quiet --requirement requirements-bench.txt
	$(BENCH)/bin/pip install --quiet --no-deps --requirement requirements-bench-no-deps.txt
	@touch $@

$(BENCH)/.installed: $(BENCH)/.ready $(SOURCES) $(shell find sparsekit -name '*.py')
	rm -rf build/lib.* build/bdist.*
	SPARSEKIT_CUDA=0 $(BENCH)/bin/pip install --quiet --no-build-isolation --no-deps --force-reinstall .
	@touch $@

clean: ## remove what the build made; the environment stays
	rm -rf build dist *.egg-info sparsekit/lib sparsekit/*.so
	find . -name __pycache__ -not -path './$(VENV)*/*' -prune -exec rm -rf {} +

distclean: clean ## remove the environment as well
	rm -rf $(VENV) $(BENCH) .venv-torch-* .pytest_cache .mypy_cache .ruff_cache .hypothesis
