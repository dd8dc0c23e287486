#!/usr/bin/env bash
# Make or reuse .venv, install the package with its dev extra if pyproject.toml has changed, and run the tests.
# Without arguments: unit tier, then integration tier. With arguments: one pytest run with them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="${PYTHON:-python3}"
if [ ! -x .venv/bin/python ]; then
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "scripts/test.sh: $PYTHON is older than 3.11; set PYTHON to a newer interpreter" >&2
        exit 2
    }
    "$PYTHON" -m venv .venv
fi

stamp=.venv/.installed-dev
fingerprint="$(sha256sum < pyproject.toml)"
if [ "$(cat "$stamp" 2>/dev/null)" != "$fingerprint" ]; then
    .venv/bin/python -m pip install -q -e ".[dev]"
    printf '%s\n' "$fingerprint" > "$stamp"
fi

# One thread per process: the tests start several ranks on few cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [ "$#" -gt 0 ]; then
    exec .venv/bin/python -m pytest "$@"
fi
.venv/bin/python -m pytest tests/unit -m "not slow"
.venv/bin/python -m pytest tests/integration -m "not slow"
