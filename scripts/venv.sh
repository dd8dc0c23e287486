# Sourced by the other scripts: a function that makes or reuses .venv in the working directory and installs the package.

# install_package STAMP PACKAGE [STAMP_OF_MORE]: pip install -e PACKAGE, unless that was done for this pyproject.toml, or
# an installation that holds more was. Stamps are files in .venv that hold the fingerprint of pyproject.toml.
install_package() {
    local python="${PYTHON:-python3}" fingerprint
    if [ ! -x .venv/bin/python ]; then
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "$0: needs Python 3.11 or newer, and $python is missing or older; set PYTHON to one" >&2
            exit 2
        }
        "$python" -m venv .venv
    fi
    fingerprint="$(sha256sum < pyproject.toml)"
    local stamp
    for stamp in "$1" "${3:-$1}"; do
        if [ "$(cat ".venv/$stamp" 2>/dev/null)" = "$fingerprint" ]; then
            return
        fi
    done
    echo "installing $2 and what it needs into .venv (once; PyTorch alone is several GB, so minutes)"
    .venv/bin/python -m pip install -q -e "$2"
    printf '%s\n' "$fingerprint" > ".venv/$1"
}
