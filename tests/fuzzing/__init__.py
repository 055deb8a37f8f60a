"""A differential fuzzer of flexsn: random cores over the whole closed op set, judged against the eager loop.

`vocabulary` says what a core may be made of, `case` is a core with its operands as data, `generate` draws one, `oracle` runs
the eager loop so that results can be compared to the bit, `check` judges, `batch` builds many kernels at once, `shrink`
makes a failing case small. Run by tests/system/test_fuzz.py and, at length, by tools/fuzz.py (`make fuzz`). `mixing` draws cores
that mix neurons and judges them to rounding: tests/system/test_fuzz_mixing.py.
"""
