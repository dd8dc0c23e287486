#!/usr/bin/env bash
# Make or reuse .venv, install the package with its dev extra if pyproject.toml has changed, and run the tests.
# Without arguments: every tier but the slow tests. With arguments: one pytest run with them, such as -m slow.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

. scripts/venv.sh
install_package .installed-dev ".[dev]"

# One thread per process: the tests start several ranks on few cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [ "$#" -gt 0 ]; then
    exec .venv/bin/python -m pytest "$@"
fi
# What stays in one process two files at a time, and what waits for a network; real runs need the cores for themselves.
.venv/bin/python -m pytest tests/unit -m "not slow" -n 2 --dist loadfile
.venv/bin/python -m pytest tests/exhaustive -m "not slow" -n 2 --dist worksteal
.venv/bin/python -m pytest tests/integration/hub -m "not slow" -n 2 --dist loadfile
.venv/bin/python -m pytest tests/integration --ignore tests/integration/hub -m "not slow"
