#!/usr/bin/env bash
# Builds for the GPU of this machine and judges the kernels on it, in one call of under ten minutes,
# offline, with the machine's own python, torch, nvcc, cmake, ninja, pybind11 and pytest: tests,
# compute-sanitizer, benchmarks. A step that fails does not keep the later ones from running; a
# sanitizer that cannot be had on the machine is no failure.
#   usage: tests/gpu_check.sh OUT_DIR [COMMIT]        results go to OUT_DIR as text and JSON
# SPARSEKIT_GPU_CHECK_REHEARSE=1 does what can be done without a GPU: the same build, the tests and
# small shapes on the host runner, the benchmarks at toy size.
set -uo pipefail

[ $# -ge 1 ] || { sed -n '2,9s/^# \?//p' "$0"; exit 2; }
mkdir -p "$1"
out=$(realpath "$1")
cd "$(dirname "$0")/.."
commit=${2:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
python=${PYTHON:-python3}
rehearse=${SPARSEKIT_GPU_CHECK_REHEARSE:-0}
limit=${SPARSEKIT_GPU_CHECK_SECONDS:-570}
# nvcc and compute-sanitizer are often there without being on the path.
for home in ${CUDA_HOME:+"$CUDA_HOME"} /usr/local/cuda /usr/local/cuda-*; do
  export PATH="$PATH:$home/bin:$home/compute-sanitizer"
done
export SPARSEKIT_CUDA=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

device=cuda
selection=(-m cuda)
benchmark_options=(--suite gpu)
if [ "$rehearse" = 1 ]; then
  device=simt
  selection=(-k "simt and not opcheck" tests/ops tests/nn tests/optim tests/test_table.py
    tests/test_cuda.py)
  benchmark_options=(--rehearse)
  export SPARSEKIT_CUDA_ARCHS=${SPARSEKIT_CUDA_ARCHS:-sm_90}
fi

has() { "$python" -c "import $1" 2>/dev/null; }
left() { echo $((limit - SECONDS)); }

# Exit status of a step that says in its last line why it cannot be done here.
export not_available=77

# record NAME EXIT_STATUS SECONDS: a line of the summary, and of the table as it grows.
record() {
  local result=ok detail
  [ "$2" = 0 ] || result=FAILED
  [ "$2" != "$not_available" ] || result="not available"
  detail=$(grep -E '[[:alnum:]]' "$out/$1.log" | tail -n 1 | cut -c 1-110)
  [ "$2" != 124 ] && [ "$2" != 137 ] || detail="out of time; $detail"
  printf '%s\t%s\t%s\t%s\n' "$1" "$result" "$3" "$detail" >>"$out/steps.tsv"
  printf '%-12s %-13s %4s s  %s\n' "$1" "$result" "$3" "$detail"
}

# step NAME MOST KEEP COMMAND...: run it for at most MOST seconds, keeping KEEP for later steps.
step() {
  local name=$1 most=$2 keep=$3 begin=$SECONDS status=0
  shift 3
  local rest=$(($(left) - keep))
  [ "$most" -lt "$rest" ] || most=$rest
  if [ "$most" -lt 3 ]; then
    echo "no time was left for this" >"$out/$name.log"
    status=1
  else
    timeout --kill-after=5 "$most" "$@" >"$out/$name.log" 2>&1 </dev/null || status=$?
  fi
  record "$name" "$status" $((SECONDS - begin))
}

versions() {
  "$python" - "$commit" "$out/versions.json" <<'END'
import json, platform, shutil, subprocess, sys

def ask(*command, word=""):
    if shutil.which(command[0]) is None:
        return None
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return next((line.strip() for line in lines if word in line.lower()), None)

import torch

query = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
found = {
    "commit": sys.argv[1],
    "gpu": ask(*query),
    "python": platform.python_version(),
    "torch": torch.__version__,
    "nvcc": ask("nvcc", "--version", word="release"),
    "cmake": ask("cmake", "--version", word="version"),
    "compute_sanitizer": ask("compute-sanitizer", "--version", word="version"),
}
open(sys.argv[2], "w").write(json.dumps(found, indent=1) + "\n")
print(found["gpu"] or "no GPU", "torch", found["torch"], "commit", found["commit"], sep="  ")
END
}

# setup.py without the metadata in pyproject.toml, which need a newer setuptools than may be here
# and which a build in place has no use for.
build() {
  "$python" - <<'END'
import runpy, sys
from setuptools.dist import Distribution

Distribution.parse_config_files = lambda self, *arguments, **keywords: None
sys.argv = ["setup.py", "--quiet", "build_ext", "--inplace"]
runpy.run_path("setup.py", run_name="__main__")
END
}

# The build has kernels and sees the GPU; otherwise all tests of it would be skipped in silence.
usable() {
  "$python" - "$device" <<'END'
import sys, torch, sparsekit

info = sparsekit.build_info()
assert info["cuda"], f"built without CUDA: {info}"
assert sys.argv[1] != "cuda" or torch.cuda.is_available(), "torch finds no GPU"
print("kernels for", info.get("cuda_archs", "?"), "under torch", torch.__version__)
END
}

tests() {
  local options=(-q -p no:cacheprovider --ignore=tests/test_hashing.py --durations=5)
  ! has xdist || options+=(-n 4 --dist worksteal)
  has hypothesis || export PYTHONPATH="$PWD/tests/stand_ins:$PYTHONPATH"
  "$python" -m pytest "${options[@]}" "${selection[@]}" | tee "$out/tests.txt"
  # A run in which all is skipped shows nothing.
  [ "${PIPESTATUS[0]}" = 0 ] && grep -qE '[0-9]+ passed' "$out/tests.txt"
}

# sanitizer TOOL MOST: takes at most so many seconds, half of them for the last case to end in.
# Without torch's cache every tensor is an allocation of its own, so that one element too far is
# seen. The log ends with what went wrong, or with what has been counted.
sanitizer() {
  local cases=("$python" tests/gpu_check_ops.py "$device")
  if [ "$rehearse" = 1 ]; then
    "${cases[@]}" $(($2 / 2))
    return
  fi
  # Importing torch under the tool may take longer than the ten seconds that it waits by itself.
  local runner=(compute-sanitizer --tool "$1" --error-exitcode 99 --report-api-errors no
    --launch-timeout 60)
  # By a part of the mangled name: torch's kernels are most of the work and not what is judged.
  # But initcheck must see what they write.
  [ "$1" = initcheck ] || runner+=(--kernel-regex kns=sparsekit)
  can_run "${runner[@]}" || return
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${runner[@]}" "${cases[@]}" $((($2 - SECONDS) / 2)) || return
  # A tool that has lost hold of the program lets it end by itself, without a summary.
  grep -q SUMMARY "$out/$1.log" || { echo "$1 has checked nothing" && return 1; }
}

# can_run RUNNER...: the tool is there, and runs a program that has nothing of ours. Not all drivers,
# containers and chips let it; if it cannot run this one, what it says about ours means nothing.
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

rm -f "$out"/steps.tsv "$out"/*.log "$out"/*.json
step versions 60 0 bash -c versions
step build 260 200 bash -c build
step usable 60 190 bash -c usable
step spills 30 190 "$python" -m tools.cuda_report
step tests 150 190 bash -c "$(declare -p selection); tests" # an array cannot be exported

# At the same time, since each is slow by itself and none is timed.
tools=(memcheck racecheck initcheck synccheck)
most=$(($(left) - 160))
[ "$most" -lt 100 ] || most=100
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
  record "$tool" "$status" "$seconds"
done

step benchmarks 400 5 "$python" -m benchmarks run "${benchmark_options[@]}" --json "$out/benchmarks.json"

"$python" - "$out" <<'END'
import json, sys
from pathlib import Path

out = Path(sys.argv[1])
read = lambda name: json.loads((out / name).read_text()) if (out / name).exists() else None
names = ("step", "result", "seconds", "detail")
lines = (out / "steps.tsv").read_text().splitlines()
steps = [dict(zip(names, line.split("\t"))) for line in lines]
whole = {"machine": read("versions.json"), "steps": steps, "benchmarks": read("benchmarks.json")}
(out / "gpu_check.json").write_text(json.dumps(whole, indent=1) + "\n")
END

echo
echo "== steps, $SECONDS s in all"
awk -F '\t' '{ printf "%-12s %-13s %4s s  %s\n", $1, $2, $3, $4 }' "$out/steps.tsv"
echo
echo "== benchmarks"
cat "$out/benchmarks.log"
! cut -f 2 "$out/steps.tsv" | grep -q FAILED
