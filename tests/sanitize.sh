#!/usr/bin/env bash
# Runs the op suite under sanitizers: the engine and the CUDA kernels on the host runner under
# AddressSanitizer with UndefinedBehaviorSanitizer, and what reads and hashes data, mutated files
# included; then the kernels under ThreadSanitizer, to which each thread of a kernel is a thread. The engine is not run under that: it does not know OpenMP's
# barriers, and would report every loop. Called by `make sanitize`; arguments go to pytest.
# `--fuzz SECONDS SEED` runs the fuzzer under the first two in place of the suite.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
build=$(ls -dt build/cmake-*/sparsekit/lib/simt | head -1)
build=${build%/sparsekit/lib/simt}
targets=(sparsekit_core_asan sparsekit_simt_asan _pybind_asan)
test "${1:-}" = --fuzz || targets+=(sparsekit_simt_tsan)
cmake --build "$build" --target "${targets[@]}"
# libstdc++ as well: a sanitizer that starts before it does not find its throw.
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
  under "$sanitizer" pytest -q -n 2 --dist worksteal -p no:cacheprovider --time-factor 3 "$@"
}

# The tests ask for more memory than there is, which must fail as it does elsewhere.
refuse=allocator_may_return_null=1
export ASAN_OPTIONS=detect_leaks=0:$refuse UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
# Preloaded, its functions are found before those of the engine that sparsekit loads.
engine=$PWD/$build/asan/libsparsekit_core.so
test -e "$engine"  # what cannot be preloaded is left out with a warning
if test "${1:-}" = --fuzz; then
  under asan tests.fuzz --backend cpu --seconds "$2" --seed "$3"
  engine=
  under asan tests.fuzz --backend simt --seconds "$2" --seed "$3"
  exit
fi
run asan tests/ops -k "not simt and not opcheck" "$@"
engine=
run asan tests/ops -k simt "$@"
# So that each bytes object has guards of its own. What is freed is kept for a while, so the test of
# the memory in use is left out, and that of faulty Parquet files, which measures memory too; and so
# are those whose loaders fork: this AddressSanitizer does not take its locks before a fork, so that
# one which another thread held is never free in the child.
PYTHONMALLOC=malloc SPARSEKIT_PYBIND_LIBRARY=$(echo "$PWD/$build"/asan/_pybind*.so) SPARSEKIT_FUZZ_FILES=3000 \
  run asan tests/data tests/test_hashing*.py \
  -k "not no_copy_of_the_strings and not workers_of and not fuzz_parquet" "$@"

# Reports go to files, since pytest's workers have no exit status that anyone looks at.
reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
# The slowest, so of one dtype each: others are the same kernels with other sizes.
TSAN_OPTIONS=log_path=$reports/race:$refuse run tsan tests/ops \
  -k "simt and not dtype1 and not dtype2" "$@"
if compgen -G "$reports/race*" >/dev/null; then
  cat "$reports"/race*
  exit 1
fi
echo "no report of any sanitizer"
