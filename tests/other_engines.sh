#!/usr/bin/env bash
# Runs the op suite on each CPU engine of this processor except the default one, which pytest runs
# anyway. Called by `make test`; arguments go to pytest. The engines have the same sources, compiled
# for other instructions, so up to 6 parametrizations of each test are enough.
# Counts of launches are left out, as they are the same for each engine.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
engines=$("$python" - <<'END'
from sparsekit import _load

has = [name for name, needs in _load.ENGINES.items() if needs <= _load.processor_flags()]
print(*({*has, "generic"} - {_load.instruction_set()}))
END
)
for engine in $engines; do
  ATEN_CPU_CAPABILITY=${engine/generic/default} "$python" -m pytest -q -n 2 --dist worksteal \
    -p no:cacheprovider --at-most 6 tests/ops \
    -k "not simt and not cuda and not opcheck and not (group_launches and not pieces)" "$@"
done
