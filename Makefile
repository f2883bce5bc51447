# Everything a person needs: `make demo`, `make test`, `make lint`, `make wheel`, `make bench`,
# `make clean`. Set-up (virtual environment, pinned dependencies, build) happens by itself and is
# not repeated when nothing has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH := .venv-bench
# Where `make bench` writes; files of three runs make the table of docs/performance.md.
RESULTS := build/bench
# Such as --quick or --threads 1.
BENCH_OPTIONS :=
# Lies beside the libraries, so that it goes when they do.
BUILT := sparsekit/lib/.built
SOURCES := CMakeLists.txt setup.py version.txt $(shell find csrc -type f)

export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test sanitize lint format wheel check-wheel bench cuda-report cuda-sass build clean distclean help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

demo: build ## train on MovieLens-100K and compare with two baselines
	$(BIN)/sparsekit train

test: build ## run the test suite
	$(BIN)/python -m pytest -n 2 --dist worksteal

sanitize: build ## run the CUDA kernels on the host under AddressSanitizer and ThreadSanitizer
	PYTHON=$(BIN)/python tests/sanitize.sh

lint: build ## ruff, mypy and clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files '*.h' '*.cpp' 'csrc/*.cu' 'csrc/*.cuh')

format: $(VENV)/.ready ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files '*.h' '*.cpp' 'csrc/*.cu' 'csrc/*.cuh')

wheel: $(VENV)/.ready ## build a wheel into dist/
	rm -rf dist build/lib.* build/bdist.*
	$(BIN)/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	@ls dist

check-wheel: wheel ## train with that wheel under two torches; downloads both, several GB
	PYTHON=$(PYTHON) tests/wheel_check.sh dist/*.whl

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

build: $(BUILT) ## compile what has changed

$(BUILT): $(VENV)/.ready $(SOURCES)
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

# torch goes first: everything else is built against it or works without it.
$(VENV)/.ready: requirements-dev.txt pyproject.toml
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --requirement requirements-dev.txt
	$(BIN)/pip install --quiet --no-build-isolation --no-deps --editable .
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
	rm -rf $(VENV) $(BENCH) .pytest_cache .mypy_cache .ruff_cache .hypothesis
