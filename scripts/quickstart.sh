#!/usr/bin/env bash
# Make or reuse .venv, install the package if pyproject.toml has changed, and train the quickstart run: two islands of
# one process each on this machine. Arguments go to `torchtitan-diloco run`, for instance --training.steps 50 or --fresh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="${PYTHON:-python3}"
if [ ! -x .venv/bin/python ]; then
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "scripts/quickstart.sh: needs Python 3.11 or newer, and $PYTHON is missing or older; set PYTHON to one" >&2
        exit 2
    }
    "$PYTHON" -m venv .venv
fi

stamp=.venv/.installed
fingerprint="$(sha256sum < pyproject.toml)"
# What scripts/test.sh installed holds all of this and the dev extra.
if [ "$(cat "$stamp" 2>/dev/null)" != "$fingerprint" ] && [ "$(cat .venv/.installed-dev 2>/dev/null)" != "$fingerprint" ]; then
    .venv/bin/python -m pip install -q -e .
    printf '%s\n' "$fingerprint" > "$stamp"
fi

exec .venv/bin/torchtitan-diloco run train_configs/quickstart.toml --islands 2 --ranks 1 "$@"
