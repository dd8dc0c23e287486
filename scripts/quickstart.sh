#!/usr/bin/env bash
# Make or reuse .venv, install the package if pyproject.toml has changed, and train the quickstart run: two islands of
# one process each on this machine. Arguments go to `torchtitan-diloco run`, for instance --training.steps 50 or --fresh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh
install_package .installed . .installed-dev

echo "training two islands on this machine, about 2 minutes; Ctrl-C stops the run and saves, the same command goes on"
exec .venv/bin/torchtitan-diloco run train_configs/quickstart.toml --islands 2 --ranks 1 "$@"
