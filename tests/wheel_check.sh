#!/usr/bin/env bash
# Installs one wheel, without rebuilding it, into a fresh environment for each torch, and trains
# with it from outside the source tree. A C program then reads what it has trained.
#   usage: tests/wheel_check.sh WHEEL [TORCH_VERSION ...]     (default: 2.13.0 2.14.1)
set -euo pipefail
wheel=$(realpath "$1")
shift
versions=("${@:-}")
[ -n "${versions[0]}" ] || versions=(2.13.0 2.14.1)
smoke=$(realpath "$(dirname "$0")/wheel_smoke.py")
example=$(realpath "$(dirname "$0")/../examples/serving/lookup.c")
python=${PYTHON:-python3}

for version in "${versions[@]}"; do
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  echo "== torch $version"
  "$python" -m venv "$folder/venv"
  "$folder/venv/bin/pip" install --quiet "torch==$version" numpy
  # No dependencies and no index: only this file is tested.
  "$folder/venv/bin/pip" install --quiet --no-deps --no-index "$wheel"
  (cd "$folder" && "$folder/venv/bin/python" -W error "$smoke" "$version")
  # shellcheck disable=SC2046  # these are several words
  (cd "$folder" && gcc -std=c99 -Wall -Wextra -Werror -pedantic "$example" -o lookup \
     $("$folder/venv/bin/python" -m sparsekit.serving --cflags --libs) && ./lookup model.sks 0)
  rm -rf "$folder"
done
echo "wheel check passed: $(basename "$wheel") under torch ${versions[*]}"
