#!/bin/sh
# Make .bench-venv: PyTorch (CPU), flexsn from this checkout, and the peers of the benchmarks.
set -eu
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
[ -x .bench-venv/bin/python ] || "$python" -m venv .bench-venv
pip=".bench-venv/bin/python -m pip --disable-pip-version-check install --quiet"
# On Linux, plain PyPI serves a CUDA build under the same version; point TORCH_INDEX_URL at PyTorch's CPU index to avoid it.
$pip ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "torch==2.13.0"
$pip setuptools numpy
echo "torch==2.13.0" > .bench-venv/constraints.txt
$pip --constraint .bench-venv/constraints.txt --editable .
$pip --no-deps --requirement benchmarks/requirements.txt
.bench-venv/bin/python -c "
import torch, flexsn, spikingjelly.activation_based.neuron
assert torch.__version__.startswith('2.13.0'), torch.__version__
print('torch', torch.__version__, '| flexsn', flexsn.__version__, '| SpikingJelly', spikingjelly.__version__ if hasattr(spikingjelly, '__version__') else '2.0.0')
"
