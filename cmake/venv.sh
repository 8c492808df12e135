#!/bin/sh
# SPDX-License-Identifier: MIT
#
# venv.sh VENV REQUIREMENTS [MODULE...] - makes the Python environment VENV hold what the file REQUIREMENTS pins, and
# does nothing when it does already. Of another Python, or another list, it is made anew, and so is one that was left
# half made. Without a network, MODULEs of other versions that this machine has will do.
set -eu
venv=$1
requirements=$2
shift 2
python=${PYTHON:-python3}

if ! command -v "$python" >/dev/null 2>&1; then
    echo "venv.sh: $python is not installed; set PYTHON to a Python 3.9 or newer" >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))'; then
    echo "venv.sh: $("$python" --version) is older than 3.9; set PYTHON to a newer one" >&2
    exit 1
fi
version=$("$python" -c 'import sys; print(sys.version, sys.base_prefix)')
stamp=$venv/holds-$({ cat "$requirements"; echo "$version"; } | cksum | tr ' ' '-')
if [ -e "$stamp" ]; then
    exit 0
fi
if ! "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
    echo "venv.sh: $python has no venv or ensurepip module, so $venv cannot be made." >&2
    echo "         Debian and Ubuntu: apt-get install python3-venv; or set PYTHON to another Python 3.9 or newer" >&2
    exit 1
fi

if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
    echo "venv.sh: $venv is there and no environment of Python" >&2
    exit 1
fi
rm -rf "$venv"
# System packages are seen, so that a machine that has the pinned versions needs no network.
"$python" -m venv --system-site-packages "$venv"
echo "venv.sh: installing $requirements into $venv"
if "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-warn-script-location --no-cache-dir \
    -r "$requirements"; then
    touch "$stamp"
elif [ $# -gt 0 ] && "$venv/bin/python" -c "import $(echo "$@" | tr ' ' ',')"; then
    echo "venv.sh: pip could not install $requirements; going on with what this machine has of: $*" >&2
else
    echo "venv.sh: pip could not install $requirements into $venv" >&2
    exit 1
fi
