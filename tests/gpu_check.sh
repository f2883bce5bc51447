#!/usr/bin/env bash
# Builds for this machine's GPU and checks and times the kernels on it, offline, with the machine's
# own python, torch, nvcc, cmake, ninja, pybind11 and pytest.
#   usage: tests/gpu_check.sh [PART ...]
# Without PART all parts run; their order is always this:
#   build       compile; kernels that spill are a failure
#   tests       tests:first   basics: outputs, ops below autograd, a graph
#               tests:ops     the op suite
#               tests:layers  layers, optimizers, streams, graphs, the demo model against the CPU
#               tests:nccl    the native exchange on one rank
#               tests:ranks   several ranks that share the GPU
#   sanitizer   memcheck, racecheck, initcheck, synccheck together; sanitizer:memcheck is one
#   bench       all benchmarks of suite gpu; bench:unique is one, and several make one run
# A call ends by itself within SPARSEKIT_GPU_CHECK_SECONDS (570). After a step that fails or runs
# out of time the later ones still run; a sanitizer that is not available is not a failure.
# Results are in $OUT, or in build/gpu_check. They are complete up to the last step that has ended:
#   gpu_check.json  machine, steps with result and seconds; benchmarks.json as they are measured;
#   log.txt  output of all steps; junit/  a file for each part of the tests.
# Without git, $COMMIT says which commit this is.
# SPARSEKIT_GPU_CHECK_REHEARSE=1 runs without a GPU: the same build, the tests and small shapes on
# the host runner, the benchmarks at toy size.
set -uo pipefail

cd "$(dirname "$0")"
wanted=("$@")
[ $# -gt 0 ] || wanted=(build tests sanitizer bench)
for part in "${wanted[@]}"; do
  case $part in
    build | tests | tests:first | tests:ops | tests:layers | tests:nccl | tests:ranks) ;;
    sanitizer | sanitizer:memcheck | sanitizer:racecheck | sanitizer:initcheck) ;;
    sanitizer:synccheck | bench | bench:?*) ;;
    *)
      awk 'NR > 1 && !sub(/^# ?/, "") { exit } NR > 1' "$(basename "$0")"
      echo "there is no part $part" && exit 2
      ;;
  esac
done

cd ..
out=${OUT:-build/gpu_check}
mkdir -p "$out"
out=$(realpath "$out")
commit=${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
python=${PYTHON:-python3}
rehearse=${SPARSEKIT_GPU_CHECK_REHEARSE:-0}
limit=${SPARSEKIT_GPU_CHECK_SECONDS:-570}
device=cuda
[ "$rehearse" != 1 ] || device=simt
# nvcc and compute-sanitizer are often installed, but not on the path.
for home in ${CUDA_HOME:+"$CUDA_HOME"} /usr/local/cuda /usr/local/cuda-*; do
  export PATH="$PATH:$home/bin:$home/compute-sanitizer"
done
export SPARSEKIT_CUDA=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
[ "$rehearse" != 1 ] || export SPARSEKIT_CUDA_ARCHS=${SPARSEKIT_CUDA_ARCHS:-sm_90}

has() { "$python" -c "import $1" 2>/dev/null; }
left() { echo $((limit - SECONDS)); }
# chosen PART: succeeds if PART, or the part that contains it, was requested.
chosen() { [[ " ${wanted[*]} " == *" $1 "* || " ${wanted[*]} " == *" ${1%%:*} "* ]]; }
# any_of PART: succeeds if PART, or a part of it, was requested.
any_of() { [[ " ${wanted[*]}" == *" $1"* ]]; }

# Exit status of a step that cannot run here; its last line of output says why.
export not_available=77

# record NAME EXIT_STATUS SECONDS LOG: add a line to the summary, and LOG to log.txt.
record() {
  local result=ok detail
  [ "$2" = 0 ] || result=FAILED
  [ "$2" != "$not_available" ] || result="not available"
  detail=$(grep -E '[[:alnum:]]' "$4" | tail -n 1 | tr '\t' ' ' | cut -c 1-110)
  [ "$2" != 124 ] && [ "$2" != 137 ] || detail="out of time; $detail"
  printf '%s\t%s\t%s\t%s\n' "$1" "$result" "$3" "$detail" >>"$out/steps.tsv"
  printf '%-20s %-13s %4s s  %s\n' "$1" "$result" "$3" "$detail"
  {
    echo "======== $1: $result, $3 s"
    cat "$4"
  } >>"$out/log.txt"
  rm "$4"
  "$python" - "$out" <<'END'
import json, sys
from pathlib import Path

out = Path(sys.argv[1])
machine = out / "versions.json"
names = ("step", "result", "seconds", "detail")
lines = (out / "steps.tsv").read_text().splitlines()
whole = {
    "machine": json.loads(machine.read_text()) if machine.exists() else None,
    "steps": [dict(zip(names, line.split("\t"))) for line in lines],
}
(out / "gpu_check.json").write_text(json.dumps(whole, indent=1) + "\n")
END
}

# step NAME MOST KEEP COMMAND...: run COMMAND for at most MOST seconds, and leave KEEP seconds for
# later steps. At the limit COMMAND gets Ctrl-C's signal, so that pytest says how far it has come.
step() {
  local name=$1 most=$2 keep=$3 begin=$SECONDS status=0
  shift 3
  local rest=$(($(left) - keep))
  [ "$most" -lt "$rest" ] || most=$rest
  if [ "$most" -lt 3 ]; then
    echo "no time was left for this" >"$out/running.txt"
    status=1
  else
    timeout --signal=INT --kill-after=10 "$most" "$@" >"$out/running.txt" 2>&1 </dev/null ||
      status=$?
  fi
  record "$name" "$status" $((SECONDS - begin)) "$out/running.txt"
}

versions() {
  "$python" - "$commit" "$out/versions.json" <<'END'
import importlib.util, json, os, platform, shutil, subprocess, sys

def ask(*command, word=""):
    if shutil.which(command[0]) is None:
        return None
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return next((line.strip() for line in lines if word in line.lower()), None)

import torch

query = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
packages = ("cupy", "triton", "xdist", "hypothesis", "numpy")
found = {
    "commit": sys.argv[1],
    "gpu": ask(*query),
    "cores": os.cpu_count(),
    "python": platform.python_version(),
    "torch": torch.__version__,
    "nvcc": ask("nvcc", "--version", word="release"),
    "cmake": ask("cmake", "--version", word="version"),
    "compute_sanitizer": ask("compute-sanitizer", "--version", word="version"),
    "packages": [name for name in packages if importlib.util.find_spec(name)],
}
open(sys.argv[2], "w").write(json.dumps(found, indent=1) + "\n")
print(found["gpu"] or "no GPU", "torch", found["torch"], "commit", found["commit"], sep="  ")
END
}

# Run setup.py without the metadata in pyproject.toml: setuptools may be too old here to read it,
# and a build in place does not need it.
build() {
  "$python" - <<'END'
import runpy, sys
from setuptools.dist import Distribution

Distribution.parse_config_files = lambda self, *arguments, **keywords: None
sys.argv = ["setup.py", "--quiet", "build_ext", "--inplace"]
runpy.run_path("setup.py", run_name="__main__")
END
}

# Check that the build has kernels and sees the GPU: otherwise GPU tests would silently be skipped.
usable() {
  "$python" - "$device" <<'END'
import sys, torch, sparsekit

info = sparsekit.build_info()
assert info["cuda"], f"built without CUDA: {info}"
assert info["nccl"], f"built without NCCL: {info}"
assert sys.argv[1] != "cuda" or torch.cuda.is_available(), "torch finds no GPU"
print("kernels for", info.get("cuda_archs", "?"), "under torch", torch.__version__)
END
}

# tests NAME ARGUMENT...: run pytest; xdist uses half as many processes as cores, but at most 8.
tests() {
  local name=$1 workers=$(($(nproc) / 2))
  shift
  local options=(-q -p no:cacheprovider --durations=5 -o "junit_family=xunit1")
  options+=(--continue-on-collection-errors)
  options+=("--junitxml=$out/junit/$name.xml")
  [ "$workers" -le 8 ] || workers=8
  # Each process starts up to four ranks, and each rank has a context on the GPU.
  [ "$name" != ranks ] || [ "$workers" -le 4 ] || workers=4
  [ "$workers" -lt 2 ] || ! has xdist || options+=(-p xdist -n "$workers")
  # Other installed plugins may give warnings; these tests would turn the warnings into errors.
  export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
  has hypothesis || export PYTHONPATH="$PWD/tests/stand_ins:$PYTHONPATH"
  [ "$name" != ranks ] || export SPARSEKIT_RANKS_DEVICE=$device
  "$python" -m pytest "${options[@]}" "$@" | tee -i "$out/tests.txt"
  local status=${PIPESTATUS[0]} passed
  passed=$(grep -cE '[0-9]+ passed' "$out/tests.txt")
  rm "$out/tests.txt"
  # A run that skips all its tests has not passed.
  [ "$status" = 0 ] && [ "$passed" -gt 0 ]
}

# sanitizer TOOL MOST: run the cases under TOOL for at most MOST seconds; half of this time is kept
# for the last case. Without torch's cache every tensor is an allocation of its own, so the tool
# sees an access one element past its end. The log ends with the error, or the number of cases.
sanitizer() {
  local cases=("$python" tests/gpu_check_ops.py "$device")
  # Importing torch under the tool may take longer than its default limit of ten seconds.
  local runner=(compute-sanitizer --tool "$1" --error-exitcode 99 --report-api-errors no
    --launch-timeout 60)
  # Check only kernels with sparsekit in their mangled name: torch's are most of the work and not
  # under test. initcheck checks all, as it must see what torch's kernels write; but not copies,
  # since tests copy tensors to the host whose ends an op leaves unused.
  if [ "$1" = initcheck ]; then
    runner+=(--check-api-memory-access no)
  else
    runner+=(--kernel-name kns=sparsekit)
  fi
  if [ "$rehearse" = 1 ]; then
    # Without a GPU the tool can check nothing, but it must accept the options.
    if command -v compute-sanitizer >/dev/null; then "${runner[@]}" --version || return; fi
    "${cases[@]}" $(($2 / 3))
    return
  fi
  can_run "${runner[@]}" || return
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${runner[@]}" "${cases[@]}" $((($2 - SECONDS) / 2)) |
    tee -i "$out/$1.tmp"
  local status=${PIPESTATUS[0]} summaries
  summaries=$(grep -c SUMMARY "$out/$1.tmp")
  rm "$out/$1.tmp"
  [ "$status" = 0 ] || return "$status"
  # A tool that loses track of the program lets it end by itself, without a summary.
  [ "$summaries" -gt 0 ] || { echo "$1 has checked nothing" && return 1; }
}

# can_run RUNNER...: check that the tool exists and can run a program without sparsekit. Some
# drivers, containers and chips do not support it; its verdict on our kernels then means nothing.
can_run() {
  if ! command -v "$1" >/dev/null; then
    echo "there is no $1"
    return "$not_available"
  fi
  local said status=0
  said=$(timeout 50 "$@" "$python" -c "import torch; torch.ones(9, device='cuda').sum().item()" 2>&1)
  status=$?
  if [ "$status" != 0 ] || ! grep -q SUMMARY <<<"$said"; then
    echo "$said"
    echo "not usable here (status $status):" \
      "$(grep -iE 'error|not supported|unable' <<<"$said" | grep -v SUMMARY | head -n 1)"
    return "$not_available"
  fi
}
export -f versions build usable tests sanitizer can_run has
export python commit out device rehearse

rm -rf "$out"/{steps.tsv,log.txt,running.txt,junit,gpu_check.json,benchmarks.json,versions.json}
mkdir -p "$out/junit"
# Seconds that are kept for later parts.
for_bench=5
! any_of bench || for_bench=130
for_sanitizer=$for_bench
! any_of sanitizer || for_sanitizer=$((for_bench + 90))

step versions 60 0 bash -c versions
if chosen build; then
  step build 400 $((for_sanitizer + $(any_of tests && echo 120 || echo 0))) bash -c build
  step spills 30 "$for_sanitizer" "$python" -m tools.cuda_report
fi
step usable 60 "$for_sanitizer" bash -c usable

if [ "$rehearse" = 1 ]; then
  first=(tests/test_cuda_first.py)
  of_ops=(-k "simt and not opcheck" tests/ops)
  nccl=(tests/nccl)
  layers=(-k "simt" tests/nn tests/optim tests/tables/test_hash_table_keys.py tests/test_cuda.py
    tests/test_cuda_layers.py)
else
  first=(-m cuda tests/test_cuda_first.py)
  of_ops=(-m cuda tests/ops)
  nccl=(-m cuda tests/nccl)
  # Not the whole folder: a file that needs a missing package or warns on import would end the part.
  layers=(-m cuda tests/nn tests/test_cuda.py tests/test_cuda_layers.py)
fi
# Only two and four ranks, and two of three combiners: starting processes takes most of the time.
ranks=(-k "not sqrtn and not 3-" tests/ranks/test_lookup.py tests/ranks/test_group.py
  tests/ranks/test_training.py)
of_tests() { # NAME MOST ARGUMENT...
  chosen "tests:$1" || return
  step "tests:$1" "$2" "$for_sanitizer" bash -c 'tests "$@"' tests "$1" "${@:3}"
}
of_tests first 90 "${first[@]}"
of_tests ops 400 "${of_ops[@]}"
of_tests layers 400 "${layers[@]}"
of_tests nccl 150 "${nccl[@]}"
of_tests ranks 450 "${ranks[@]}"

# The tools run at the same time: each is slow, and none is timed.
tools=()
for tool in memcheck racecheck initcheck synccheck; do
  ! chosen "sanitizer:$tool" || tools+=("$tool")
done
most=$(($(left) - for_bench))
# Four minutes are enough for all cases, even if more time is left.
[ "$most" -lt 240 ] || most=240
[ "$rehearse" != 1 ] || [ "$most" -lt 60 ] || most=60
begin=$SECONDS
for tool in "${tools[@]}"; do
  (
    if [ "$most" -lt 20 ]; then
      echo "no time was left for this" >"$out/$tool.log"
      status=1
    else
      status=0
      timeout --kill-after=5 "$most" bash -c "sanitizer $tool $most" \
        >"$out/$tool.log" 2>&1 </dev/null || status=$?
    fi
    echo "$status $((SECONDS - begin))" >"$out/$tool.status"
  ) &
done
wait
for tool in "${tools[@]}"; do
  read -r status seconds <"$out/$tool.status"
  rm "$out/$tool.status"
  record "sanitizer:$tool" "$status" "$seconds" "$out/$tool.log"
done

if any_of bench; then
  names=()
  chosen bench || for part in "${wanted[@]}"; do
    [[ $part != bench:* ]] || names+=("${part#bench:}")
  done
  options=(--suite gpu)
  [ "$rehearse" != 1 ] || options=(--rehearse)
  step bench 560 5 "$python" -m benchmarks run "${options[@]}" --json "$out/benchmarks.json" \
    "${names[@]}"
fi

echo
echo "== $SECONDS s in all; $out"
awk -F '\t' '{ printf "%-20s %-13s %4s s  %s\n", $1, $2, $3, $4 }' "$out/steps.tsv"
if [ -e "$out/benchmarks.json" ]; then
  echo
  sed -n '/^======== bench:/,$p' "$out/log.txt"
fi
failed=$(cut -f 2 "$out/steps.tsv" | grep -c FAILED)
# gpu_check.json has the contents of these files.
rm -f "$out"/{steps.tsv,versions.json}
rmdir --ignore-fail-on-non-empty "$out/junit"
[ "$failed" = 0 ]
