#!/bin/sh
# The GPU kernels under compute-sanitizer (part of CUDA): reads and writes outside of arrays (memcheck), and reads of
# memory that nobody wrote (initcheck). Minutes. PYTHON is a python3 with PyTorch for CUDA, pytest and hypothesis.
#   sh tools/gpu_memcheck.sh [pytest selection, by default a part of the parity matrix]
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
SANITIZER=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
SELECTED=${*:-"test_matrix and lif or test_strides or test_params or test_states or test_missing_cotangents or test_integer"}
export PYTHONPATH="$PWD" PYTORCH_NO_CUDA_MEMORY_CACHING=1 # every tensor an allocation of its own, so that its end is known
test -x "$SANITIZER" || { echo "no compute-sanitizer: set SANITIZER to its path" >&2; exit 2; }

# what must be found: a kernel of N neurons on arrays of fewer
if "$SANITIZER" --tool memcheck --error-exitcode 86 "$PYTHON" tools/gpu_overrun.py > /tmp/flexsn-overrun.txt 2>&1; then
    echo "memcheck does not see a seeded overrun; see /tmp/flexsn-overrun.txt" >&2; exit 3
fi
grep -q "Invalid __global__" /tmp/flexsn-overrun.txt || { tail -20 /tmp/flexsn-overrun.txt >&2; exit 3; }
echo "memcheck sees a seeded overrun"
check() { # memcheck looks at the generated kernels alone; initcheck must see every kernel, since any may write what they read
    echo "== $*"
    "$SANITIZER" --tool "$@" --error-exitcode 86 --report-api-errors no \
        "$PYTHON" -m pytest tests/test_parity.py --device cuda -q -p no:cacheprovider -k "$SELECTED"
}
check memcheck --kernel-name 'kns=ward'
check initcheck
