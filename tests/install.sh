#!/bin/sh
# Build the source archive and, from that, the wheel; install the wheel in a fresh environment and run the demo there:
#
#     tests/install.sh DIRECTORY
#
# pip takes torch from its cache where it has been installed before.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
place=$(cd "$1" && pwd)
export PIP_DISABLE_PIP_VERSION_CHECK=1

python3 -m venv "$place/build"
"$place/build/bin/python" -m pip install --quiet build
"$place/build/bin/python" -m build --outdir "$place/dist" "$root" > "$place/build.log" || { cat "$place/build.log"; exit 1; }

python3 -m venv "$place/env"
"$place/env/bin/python" -m pip install --quiet torch==2.13.0 "$place"/dist/*.whl
"$place/env/bin/python" -m pip check

# From elsewhere, so that nothing of the checkout is seen.
cd "$place"
unset PYTHONPATH
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' "$root/aioarena/__init__.py")
"$place/env/bin/python" - "$version" "$place" <<'PYTHON'
import importlib.metadata, sys, tarfile
from pathlib import Path

import aioarena

version, place = sys.argv[1:]
files = {str(file) for file in importlib.metadata.files("aioarena")}
assert Path(aioarena.__file__).is_relative_to(Path(place, "env")), aioarena.__file__
assert aioarena.__version__ == importlib.metadata.version("aioarena") == version
assert "aioarena/py.typed" in files
assert not [file for file in files if not file.startswith(("aioarena/", "aioarena-", "../"))], files
(archive,) = Path(place, "dist").glob("*.tar.gz")
names = {name.partition("/")[2] for name in tarfile.open(archive).getnames()}
assert {"README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "mkdocs.yml", "docs/index.md", "tests/install.sh",
        "examples/quickstart.py", "aioarena/py.typed", "pyproject.toml"} <= names, names
PYTHON
test "$("$place/env/bin/aioarena" --version)" = "aioarena $version"
"$place/env/bin/aioarena" demo --size 1024 --readers 2 --pictures 2
