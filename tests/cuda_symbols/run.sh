#!/bin/sh
# The tests of this folder, on a CUDA build of torch; no GPU and no driver are needed.
#
#   tests/cuda_symbols/run.sh PYTHON FOLDER [TORCH]     from the project's root; 6 GB in FOLDER
set -eu

python=$1
folder=$2
torch=${3:-torch==2.15.0}

test -x "$folder/bin/python" || "$python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet "$torch"
"$folder/bin/python" -m pip install --quiet --editable . pytest pytest-timeout hypothesis
"$folder/bin/python" -c 'import torch; assert torch.version.cuda, f"{torch.__version__} has no CUDA"'
"$folder/bin/python" -m pytest tests/cuda_symbols
