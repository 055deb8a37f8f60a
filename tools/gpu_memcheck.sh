#!/bin/sh
# The GPU kernels under compute-sanitizer (part of CUDA): reads and writes outside of arrays (memcheck), and reads of
# memory that nobody wrote (initcheck). Five minutes on 16 cores. PYTHON is a python3 with PyTorch for CUDA, pytest and hypothesis.
#   JOBS=15 sh tools/gpu_memcheck.sh [pytest selection, by default the whole parity matrix but its random cores]
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
JOBS=${JOBS:-4} # processes that share the GPU, each with every JOBS-th test
SANITIZER=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
SELECTED=${*:-"not random_cores"}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTORCH_NO_CUDA_MEMORY_CACHING=1 # a tensor is an allocation: its end is known
test -x "$SANITIZER" || { echo "no compute-sanitizer: set SANITIZER to its path" >&2; exit 2; }
FOLDER=$(mktemp -d)

must_find() { # fault, tool, what the tool says of it
    if "$SANITIZER" --tool "$2" --error-exitcode 86 "$PYTHON" tools/gpu_faults.py "$1" > "$FOLDER/$1.txt" 2>&1; then
        echo "$2 does not see a seeded fault ($1); see $FOLDER/$1.txt" >&2; exit 3
    fi
    grep -q "$3" "$FOLDER/$1.txt" || { tail -20 "$FOLDER/$1.txt" >&2; exit 3; }
    echo "$2 sees a seeded fault ($1)"
}
must_find overrun memcheck "Invalid __global__"
must_find unwritten initcheck "Uninitialized __global__"

"$PYTHON" -m pytest tests/operator/test_parity.py --device cuda -q -p no:cacheprovider --collect-only -k "$SELECTED" > "$FOLDER/collected" ||
    { tail -20 "$FOLDER/collected" >&2; exit 2; }
grep :: "$FOLDER/collected" > "$FOLDER/tests"
check() { # memcheck looks at the generated kernels alone; initcheck must see every kernel, since any may write what they read
    for job in $(seq "$JOBS"); do
        awk -v n="$JOBS" -v k="$job" 'NR % n == k % n' "$FOLDER/tests" | tr '\n' '\0' |
            xargs -0 "$SANITIZER" --tool "$@" --error-exitcode 86 --report-api-errors no "$PYTHON" -m pytest --device cuda -q \
                -p no:cacheprovider > "$FOLDER/$1.$job" 2>&1 && touch "$FOLDER/$1.$job.passed" &
    done
    wait
    for job in $(seq "$JOBS"); do
        test -e "$FOLDER/$1.$job.passed" || { tail -50 "$FOLDER/$1.$job" >&2; echo "$1 failed; see $FOLDER/$1.*" >&2; exit 4; }
        tail -n 2 "$FOLDER/$1.$job"
    done
    echo "$1: $(wc -l < "$FOLDER/tests") tests, nothing found"
}
check memcheck --kernel-name 'kns=ward'
check initcheck
