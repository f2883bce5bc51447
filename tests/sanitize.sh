#!/usr/bin/env bash
# Runs the op suite under sanitizers. AddressSanitizer with UndefinedBehaviorSanitizer checks the
# CPU engine, the CUDA kernels on the host runner, the reading and hashing of data, and lookups in
# snapshots; files are mutated. ThreadSanitizer then checks only the kernels, whose threads are host
# threads: it does not know OpenMP's barriers and would report every loop of the CPU engine.
# Called by `make sanitize`; arguments go to pytest. `--fuzz SECONDS SEED` runs the fuzzer under the
# first two sanitizers instead of the suite.
# `make test` runs all parametrizations; a sanitizer, which looks at memory and not at results, gets
# up to 8 of each test, and ThreadSanitizer, which takes half of the time, up to 5.
# `--at-most 1000 --all-cases` runs them all here, too.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
build=$(ls -dt build/cmake-*/sparsekit/lib/simt | head -1)
build=${build%/sparsekit/lib/simt}
targets=(sparsekit_core_asan sparsekit_simt_asan _pybind_asan)
test "${1:-}" = --fuzz || targets+=(sparsekit_simt_tsan sparsekit_serving_{asan,tsan})
cmake --build "$build" --target "${targets[@]}"
# Preload libstdc++ as well: a sanitizer that starts first does not find its function for throw.
preload() { echo "$(g++ -print-file-name="$1") $(g++ -print-file-name=libstdc++.so.6)"; }

under() {
  local sanitizer=$1
  shift
  LD_PRELOAD=$(preload "lib$sanitizer.so")${engine:+ $engine} \
    SPARSEKIT_SIMT_LIBRARY=$PWD/$build/sparsekit/lib/simt/libsparsekit_simt_$sanitizer.so \
    "$python" -m "$@"
}
run() {
  local sanitizer=$1
  shift
  under "$sanitizer" pytest -q -n 2 --dist worksteal -p no:cacheprovider --time-factor 3 \
    --at-most 8 "$@"
}

# Tests ask for more memory than the machine has; this must fail as without a sanitizer.
refuse=allocator_may_return_null=1
export ASAN_OPTIONS=detect_leaks=0:$refuse UBSAN_OPTIONS=print_stacktrace=1
# The preloaded engine's functions are found first, before those that sparsekit loads.
engine=$PWD/$build/asan/libsparsekit_core.so
test -e "$engine"  # the loader would skip a missing file with a warning
if test "${1:-}" = --fuzz; then
  under asan tests.fuzz --backend cpu --seconds "$2" --seed "$3"
  engine=
  under asan tests.fuzz --backend simt --seconds "$2" --seed "$3"
  exit
fi
# Tests of launches count them for up to 500 tables; other tests run the same kernels.
run asan tests/ops -k "not simt and not opcheck and not test_launches" "$@"
engine=
run asan tests/ops -k simt "$@"
# PYTHONMALLOC=malloc gives each bytes object guards of its own. Two kinds of tests are left out:
# tests that measure memory (of strings and of faulty Parquet files), because AddressSanitizer keeps
# freed memory for a while, and tests whose loaders fork, because this version does not take its
# locks before a fork: a lock that another thread holds is then never released in the child.
PYTHONMALLOC=malloc SPARSEKIT_PYBIND_LIBRARY=$(echo "$PWD/$build"/asan/_pybind*.so) SPARSEKIT_FUZZ_FILES=2000 \
  run asan tests/data tests/test_hashing*.py \
  -k "not no_copy_of_the_strings and not workers_of and not fuzz_parquet" "$@"
SPARSEKIT_SERVING_LIBRARY=$PWD/$build/asan/libsparsekit_serving.so \
  run asan tests/serving/test_{arguments,damage,damaged_deltas,following,lookup}.py \
  -k "not memory and not nobody" "$@"

# Reports go to files: nothing looks at the exit status of pytest's workers.
reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
# ThreadSanitizer is the slowest, so it gets one dtype: the others use the same kernels.
TSAN_OPTIONS=log_path=$reports/race:$refuse run tsan tests/ops --at-most 5 \
  -k "simt and not dtype1 and not dtype2" "$@"
# One writer with deltas, one thread that follows, and two readers. SPARSEKIT_STRESS_SECONDS=60 runs longer.
serving=$PWD/$build/tsan/libsparsekit_serving.so
g++ -std=c++17 -O1 -g -fsanitize=thread -pthread -Icsrc -Icsrc/core -Icsrc/core/include \
  tests/serving/live_stress.cpp "$serving" -Wl,-rpath,"${serving%/*}" -o "$reports/live_stress"
mkdir "$reports/log"
TSAN_OPTIONS=log_path=$reports/race "$reports/live_stress" "$reports/log" \
  "${SPARSEKIT_STRESS_SECONDS:-10}"
if compgen -G "$reports/race*" >/dev/null; then
  cat "$reports"/race*
  exit 1
fi
echo "no report of any sanitizer"
