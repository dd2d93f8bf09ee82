#!/usr/bin/env bash
# Makes a virtual environment with tmax and its development tools: install.sh PYTHON VENV
set -euo pipefail
python=${1:-python3}
venv=${2:-.venv}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "tmax needs Python 3.11 or later; give one with PYTHON=…" >&2
    exit 1
}
# Debian and Ubuntu split venv off into a package of its own.
if ! "$python" -m venv "$venv" 2>/dev/null; then
    minor=$("$python" -c 'import sys; print(f"{sys.version_info[0]}.{sys.version_info[1]}")')
    echo "cannot make a virtual environment; try: apt-get install python$minor-venv" >&2
    exit 1
fi
"$venv/bin/pip" install --quiet --disable-pip-version-check --upgrade pip
# The CPU build of torch is taken first where the index has one: the default build brings several GB of CUDA.
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    "$venv/bin/pip" install --quiet --disable-pip-version-check 'torch==2.13.0' ||
        "$venv/bin/pip" install --quiet --disable-pip-version-check 'torch>=2.9,<2.15'
fi
"$venv/bin/pip" install --quiet --disable-pip-version-check --editable '.[dev]'
