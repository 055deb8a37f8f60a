# ruff: noqa: E501  (a table)
"""Seeded faults: one change of the package each, in a copy of it, and the test that must fail then.

python tools/seed_faults.py            # all of them (minutes): prints caught, timed out or NOT CAUGHT
python tools/seed_faults.py lock hash  # those whose name contains a word
python tools/seed_faults.py --write    # all, and the table of docs/guarantees.md anew
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "guarantees.md"
BEGIN, END = "<!-- seeded faults: written by tools/seed_faults.py -->", "<!-- end of seeded faults -->"


@dataclass(frozen=True)
class Fault:
    """A fault: in `file`, `text` (which stands there once) becomes `wrong`; `test` must fail (or never end, of one that `hangs`)."""

    name: str
    file: str
    text: str
    wrong: str
    test: str
    hangs: bool = False


FAULTS = [
    Fault(
        "the backward does not reload checkpoints", "_codegen/cpp.py",
        'f"        if (start > 0) std::memcpy({role}_row, {a.role}_seq', 'f"        if (start < 0) std::memcpy({role}_row, {a.role}_seq',
        "operator/test_parity.py::test_wide_state_core_with_longer_chunks",
    ),
    Fault(
        "the last chunk ends one step early", "_codegen/cpp.py", "const int64_t end = start + K < T ? start + K : T;",
        "const int64_t end = start + K < T ? start + K : T - (T > K);", "operator/test_parity.py::test_final_states[leaky-float32]",
    ),
    Fault(
        "rows are read past the end of an array", "_runtime/cpp/tile.h", "if (full) return row;", "if (true) return row;",
        "system/test_sanitizers.py::test_nothing_beside_the_arrays_is_touched[far-(torch.float32,)]",
    ),
    Fault(
        "one element too many is stored", "_runtime/cpp/tile.h", "for (int64_t i = 0; i < n; ++i) out[begin + i]", "for (int64_t i = 0; i <= n; ++i) out[begin + i]",
        "system/test_sanitizers.py::test_nothing_beside_the_arrays_is_touched[far-(torch.float32,)]",
    ),
    Fault(
        "half inputs are rounded after every op", "_program/captured.py", "torch.float32 if m.dtype in HALF else m.dtype) for i, m", "m.dtype) for i, m",
        "operator/test_parity.py::test_final_states[leaky-float16]",
    ),
    Fault(
        "the compiler may contract a * b + c", "_runtime/cpp_kernel.py", '"-ffp-contract=off"', '"-ffp-contract=fast"', "operator/test_parity.py::test_final_states[leaky-float32]",
    ),
    Fault(
        "a folder that others can write is used", "_runtime/disk_cache.py", "bool(info.st_mode & stat.S_IWOTH or", "bool(0 or",
        "system/test_security.py::test_folders_that_others_can_write",
    ),
    Fault(
        "an entry that others can write is loaded", "_runtime/disk_cache.py", "info.st_uid != os.getuid() or info.st_mode & 0o022:", "False:",
        "system/test_security.py::test_a_planted_library_is_not_loaded[an entry that everybody can write]",
    ),
    Fault(
        "links are followed", "_runtime/disk_cache.py", "os.O_RDONLY | os.O_NOFOLLOW", "os.O_RDONLY", "runtime/test_launch_cpp.py::test_entry_that_is_a_link_is_not_loaded",
    ),
    Fault(
        "the hash of an entry is not looked at", "_runtime/disk_cache.py", "return hashlib.sha256(file.read()).hexdigest() == path",
        "return hashlib.sha256(file.read()).hexdigest() != path", "system/test_faults.py::test_a_damaged_entry_is_built_anew[one bit]",
    ),
    Fault(
        "the key forgets the compiler", "_runtime/cpp_kernel.py", "*launch_compiler.identity(), _processor()", "_processor()",
        "runtime/test_launch_cpp.py::test_what_the_key_depends_on",
    ),
    Fault(
        "a library enters the cache untried", "_runtime/cpp_kernel.py", "        _entry_point(library, None, symbol)\n", "",
        "system/test_faults.py::test_a_compiler_that_makes_something_else[text]",
    ),
    Fault(
        "the compiler is run by a shell", "_runtime/cpp_compiler.py", "            list(command), stdin", '            " ".join(command), shell=True, stdin',
        "system/test_security.py::test_odd_paths_reach_the_compiler_as_they_are",
    ),
    Fault(
        "a compiler may take for ever", "_runtime/cpp_compiler.py", "        if left <= 0:\n            return None\n", "        left = 1.0\n",
        "system/test_faults.py::test_a_compiler_that_hangs",
    ),
    Fault(
        "all that a compiler says is kept", "_runtime/cpp_compiler.py", "(kept + block)[-_KEPT:]", "kept + block",
        "system/test_faults.py::test_a_compiler_that_prints_megabytes",
    ),
    Fault(
        "a full disk is taken for a failing compiler", "_runtime/cpp_compiler.py", 'if "No space left" in said', 'if "nothing" in said',
        "system/test_faults.py::test_a_full_disk",
    ),
    Fault(
        "threads do not wait for each other's builds", "_runtime/cpp_kernel.py", "kernel, build = _kernels.get(key), _builds.get(key)",
        "kernel, build = _kernels.get(key), None", "system/test_load.py::test_64_threads_that_compile_the_same_core_build_once",
    ),
    Fault(
        "a core is captured without the lock", "_program/compiled.py", "    with lock:\n        if exact in", "    if True:\n        if exact in",
        "system/test_load.py::test_64_threads_that_compile_the_same_core_build_once",
    ),
    Fault(
        "kernels use threads in a forked child", "_runtime/fork.py", "return 1 if _forked else torch", "return torch",
        "system/test_faults.py::test_in_a_forked_child[threads of a kernel]",
    ),
    Fault(
        "ops inside a call use threads in a forked child",
        "_runtime/fork.py",
        "return _forked and torch.get_num_threads() > 1",
        "return False",
        "system/test_faults.py::test_in_a_forked_child[forward and backward]",
    ),
    Fault(
        "a fork does not wait for the lock", "_capture/reads.py", "os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)\n",
        "", "system/test_faults.py::test_a_fork_while_a_thread_has_swapped_what_a_core_captured",
    ),
    Fault(
        "a table keeps every core", "_operator/dispatch.py", "    if not isinstance(core, types.FunctionType):\n        return _looks.get(core)\n",
        "    _looks[core] = vars(core).get(reading.KEPT)\n    if not isinstance(core, types.FunctionType):\n        return _looks.get(core)\n",
        "system/test_load.py::test_a_dropped_module_dies[closure over its network]",
    ),
    Fault(
        "what is known of a core holds it", "_capture/reads_look.py", "                return Core(weakref.ref(value))\n", "                return own\n",
        "system/test_load.py::test_a_dropped_core_dies[Learned-scan]",
    ),
    Fault(
        "gradients of two params share memory", "_program/compiled.py", "if apart else found", "if False else found",
        "operator/test_parity.py::test_gradients_of_params_share_no_memory[0-scan]",
    ),
    Fault(
        "what a core differentiates requires grad in every call", "_operator/call.py", "if need or everything]", "if True]",
        "test_scan.py::test_carried_states_without_gradients_belong_to_no_graph[a counter-eager]",
    ),
    Fault(
        "a core is recorded in inference mode", "_capture/trace.py", "torch.inference_mode(False), ", "",
        "system/test_load.py::test_the_first_call_of_a_core_that_views_a_tensor_trains_nothing[0-False-inference_mode]",
    ),
    Fault(
        "a half-precision param reaches the core as it is", "_operator/call.py", "upcast(t.detach()) if k < explicit else t.detach()", "t.detach()",
        "operator/test_call.py::test_params_of_half_precision_are_computed_in_single",
    ),
    Fault(
        "values of a trace hold autograd's graph", "_capture/trace.py", "        _let_go(recorder.graph)\n", "", "system/test_load.py::test_a_dropped_module_dies[closure]",
    ),
    Fault(
        "kernels are never unloaded", "_runtime/cpp_kernel.py", "        weakref.finalize(owner, _ctypes.dlclose, library._handle).atexit = False\n", "        pass\n",
        "system/test_load.py::test_kernels_that_no_program_uses_are_unloaded",
    ),
    Fault(
        "names of the user stand in code as they are", "_ir/identifiers.py", '    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,40}", name) or', "    if",
        "system/test_security.py::test_no_text_of_a_stranger_reaches_generated_code[lif]",
    ),
    Fault(
        "comments hold what the user wrote", "_codegen/language.py", 'return re.sub(r"[^\\x20-\\x7e]|\\\\|\\?\\?", "_", text)[:110].rstrip()', "return text[:110].rstrip()",
        "system/test_security.py::test_what_stands_in_comments_stays_there",
    ),
    Fault(
        "a program may name any operator", "_program/serialize.py", "    if found._schema.is_mutable:\n", "    if False:\n",
        "system/test_security.py::test_operators_that_do_more_than_compute_are_refused",
    ),
    Fault(
        "operators do not look at what they are given", "_operator/library.py", "    for a in launch.kernel.plan.reads:\n", "    for a in ():\n",
        "system/test_security.py::test_operands_of_the_operators_are_checked",
    ),
    Fault(
        "kernels read wherever a pointer leads", "_operator/call.py", "t.device != self._device:", "False:",
        "operator/test_call.py::test_what_hooks_unpack_on_another_device_is_refused[first call]",
    ),
    Fault(
        "what a vmap left is another transform's", "_operator/dispatch.py", "        stale = left_by_an_ended_vmap\n", "        return\n",
        "operator/test_transforms.py::test_states_that_a_vmap_left_are_no_other_transforms[auto-grad]",
    ),
    Fault(
        "PyTorch's scan runs under every transform", "_torch_compile/hop.py", " and not transforms_active()\n", "\n",
        "torch_compile/test_hop.py::test_transforms_of_what_no_kernel_expresses[grad-mixing]",
    ),
    Fault(
        "Dynamo compiles what asks for transforms", "_torch/transforms.py", "@unseen_by_dynamo\ndef active_transforms", "def active_transforms",
        "torch_compile/test_loops.py::test_mistakes_compiled[no input-while_loop]",
    ),
    Fault(
        "a core does not call its network", "_capture/reads_look.py", "            self.passed_on.add(id(value))\n", "            return\n",
        "capture/test_reads.py::test_what_a_core_reads_of_its_network_in_any_way[method-ByCall]",
    ),
    Fault(
        "Dynamo compiles the operator's own rules", "_torch_compile/hop.py", "    @unseen_by_dynamo  # which would", "    # which would",
        "torch_compile/test_hop.py::test_gradients_between_compiled_parts",
    ),
    Fault(
        "generated code drops tangents", "_torch_compile/call_sites.py", "        if forward_ad_level() >= 0:\n", "        if False:\n",
        "operator/test_transforms.py::test_a_compiled_call_drops_no_tangents[inductor-False]",
    ),
    Fault(
        "Inductor is not told of the operators", "_torch_compile/call_sites.py", "WHEN_TRACED.append(prepare_inductor)\n", "prepare_inductor\n",
        "torch_compile/test_compile.py::test_inductor_fuses_the_prologue_with_what_makes_the_params",
    ),
    Fault(
        "a stateless core's results lie as its operands do", "lowlevel/stateless.py", "y.contiguous()", "y",
        "lowlevel/test_stateless.py::test_results_are_contiguous[None]",
    ),
    Fault(
        "Inductor's gradients of PyTorch's scan are trusted", "_torch_compile/loops.py", '            dynamo.doubt_gradients("scan")\n', "            pass\n",
        "torch_compile/test_loops.py::test_gradients_of_compilers_that_are_not_known_are_doubted[another]",
    ),
    Fault(
        "handles drop tangents", "lowlevel/operators.py", "    refuse_forward_mode(_of(handle), tensors)\n", "",
        "lowlevel/test_lowlevel_ops.py::test_forward_mode_is_refused[inference-False]",
    ),
    Fault(
        "what a network keeps is its neuron's", "_capture/reads_look.py", "        if network:\n            self.network(path, module, own, depth)\n",
        "        if False:\n            self.network(path, module, own, depth)\n", "capture/test_reads.py::test_what_a_core_can_reach_and_does_not_read_stays_the_networks[method]",
    ),
    Fault(
        "zeros outlive the cotangent that they were made from", "_ir/graph.py", "    return bool(const.of) and", "    return False and",
        "system/test_fuzz_findings.py::test_zeros_made_from_an_absent_cotangent_are_absent[rounded]",
    ),
    Fault(
        "cotangents are taken in another order of memory", "_runtime/layout.py", "        return dense(grad, leading, order)\n", "        return grad.contiguous()\n",
        "runtime/test_rows.py::test_memory_in_any_order[(3, 1, 1)-channels_last]",
    ),
    Fault(
        "a moved interface is not named", "_torch/availability.py", "    if not missing:\n", "    if True:\n", "torch_names/test_compatibility.py::test_it_is_said_once",
    ),
]  # fmt: skip


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """A copy of what the tests need."""
    with tempfile.TemporaryDirectory(prefix="flexsn-fault-") as folder:
        for name in ("flexsn", "tests", "docs", "tools", "README.md", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder) / name)
        yield Path(folder)


PASSED, FAILED, TIMED_OUT = "passed", "failed", "timed out"


def outcome(folder: Path, tests: Iterable[str], limit: float = 1500) -> str:
    """Whether tests of a copy pass, fail, or take more than so many seconds."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *(f"tests/{test}" for test in tests)]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    if done.returncode > 1:  # 1: tests failed; negative: they killed the process
        raise SystemExit(f"pytest did not run {', '.join(tests)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return FAILED if done.returncode else PASSED


def tried(fault: Fault, limit: float = 180) -> str:
    """What the test does on a copy of the package with the fault."""
    with copied() as folder:
        file = folder / "flexsn" / fault.file
        text = file.read_text()
        if text.count(fault.text) != 1:
            raise SystemExit(f"{fault.name}: its text stands {text.count(fault.text)} times in {fault.file}; adapt tools/seed_faults.py")
        file.write_text(text.replace(fault.text, fault.wrong))
        return outcome(folder, [fault.test], limit)


def is_caught(fault: Fault, found: str) -> bool:
    """Whether the test failed; one that takes for ever says so only of a fault that hangs, and else of a slow machine."""
    return found == FAILED or (found == TIMED_OUT and fault.hangs)


def row(fault: Fault, found: str) -> str:
    said = "yes" if found == FAILED else "yes: it hangs" if is_caught(fault, found) else f"**no: {found}**"
    return f"| {fault.name} | `{fault.file}` | `{fault.test.replace('::', '`: `')}` | {said} |"


def write(results: dict[Fault, str]) -> None:
    """The table of the page, with new rows for the faults that ran; the others stay as they are."""
    text = PAGE.read_text()
    start, end = text.index(BEGIN), text.index(END)
    old = {line.split(" | ")[0].removeprefix("| "): line for line in text[start:end].splitlines() if line.startswith("| ")}
    rows = [row(f, results[f]) if f in results else old[f.name] for f in FAULTS if f in results or f.name in old]
    PAGE.write_text(
        "\n".join([text[:start] + BEGIN, "| seeded fault | in | test | caught |", "| --- | --- | --- | --- |", *rows, text[end:]])
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    chosen = [f for f in FAULTS if not arguments.words or any(w in f.name for w in arguments.words)]
    results = {}
    with copied() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        control = pool.submit(outcome, folder, sorted({fault.test for fault in chosen}))
        for fault, found in zip(chosen, pool.map(tried, chosen), strict=True):
            results[fault] = found
            said = ("caught" if is_caught(fault, found) else "NOT CAUGHT") + f", {TIMED_OUT}" * (found == TIMED_OUT)
            print(f"{said}: {fault.name} ({fault.test})", flush=True)
        if control.result() != PASSED:
            raise SystemExit("the tests do not pass without a fault")
    print("without a fault all tests pass", flush=True)
    if arguments.write:
        write(results)
    return 0 if all(is_caught(fault, found) for fault, found in results.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
