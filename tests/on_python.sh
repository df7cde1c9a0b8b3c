#!/bin/sh
# Run the tests on another Python, in an environment of its own, .venv/VERSION, which is kept for the next time:
#
#     tests/on_python.sh 3.13 [ARGUMENTS FOR PYTEST]
#
# The Python is one on PATH or of pyenv, or else one that uv downloads. AIOARENA_TORCH=torch==2.13.0+cpu, with pip's own
# settings for where to find it, takes another build of torch than PyPI's, which has CUDA on x86-64 and weighs several GB.
set -eu
cd "$(dirname "$0")/.."
version=${1:?which Python? e.g. tests/on_python.sh 3.13}
shift
env=.venv/$version

find_python() {
    # The first is a shim of pyenv's at times, which is there for versions that are not.
    for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
        if "$candidate" -c "import venv" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
}

if ! "$env/bin/python" -c "import torch" 2>/dev/null; then
    python=$(find_python)
    if [ -n "$python" ]; then
        "$python" -m venv --clear "$env"
    else
        python3 -m venv --clear .venv/uv
        .venv/uv/bin/python -m pip install --quiet uv
        .venv/uv/bin/uv venv --clear --seed --python "$version" "$env"
    fi
    "$env/bin/python" -m pip install --quiet "${AIOARENA_TORCH:-torch==2.13.0}"
fi
"$env/bin/python" -m pip install --quiet --disable-pip-version-check -e '.[test]'
"$env/bin/python" --version
exec "$env/bin/python" -m pytest "$@"
