"""Test and measure flexsn on an NVIDIA GPU against its bounds and its peers, and keep the numbers in one JSON file.

    python benchmarks/gpu.py --output benchmarks/results/gpu_<date>.json [--only kernels calls ...]

Needs PyTorch with CUDA, triton, pytest and, for the peers, SpikingJelly 2.0.0. Parts: tests, kernels, store, calls, peers,
memory, compile, workload, cupy. The last needs $CUPY_SITE, a folder for PYTHONPATH with CuPy and SpikingJelly 0.0.0.0.14, the last
that has kernels of CuPy; it is left out where that is not set. `python benchmarks/report_gpu.py` turns the file into docs/performance_gpu.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import cores
import peers as candidates
from cores import ADAPTIVE, HH, LIF_SIGMOID, Neuron
from torch import Tensor

import flexsn
from flexsn._capture.signature import make_signature
from flexsn._capture.trace import Meta
from flexsn._codegen import triton as render_triton
from flexsn._program.compiled import Program, program_of
from flexsn._runtime.triton.kernel import Kernel, finish_builds, load
from flexsn.scan import look

ROOT = Path(__file__).parents[1]
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SIZES = {
    LIF_SIGMOID.name: [(32, 3_211_264, F32), (1024, 131_072, F32), (8, 8_388_608, F16), (8, 8_388_608, BF16), (1024, 16_384, F32),
                       (96, 32_768, F32), (32, 802_816, F32), (4, 8_388_608, F32), (128, 262_144, F32), (512, 65_536, F32),
                       (12, 4_194_304, F32), (4, 16_777_216, F16), (1024, 131_072, F16), (1024, 16_384, F16)],
    ADAPTIVE.name: [(32, 1_605_632, F32), (1024, 65_536, F32), (1024, 16_384, F32), (96, 32_768, F32)],
    HH.name: [(32, 1_605_632, F32), (1024, 16_384, F32), (96, 32_768, F32)],
}  # fmt: skip
NEURONS = {n.name: n for n in (LIF_SIGMOID, ADAPTIVE, HH)}
PEERS_ASKED: list[str] | None = None  # all


# --- kernels alone ------------------------------------------------------------------------------------------------------------
def program(neuron: Neuron, dtype: torch.dtype) -> Program:
    inputs, states = len(neuron.drive), len(neuron.rest)
    sig, captured = make_signature(neuron.core, inputs, states, 0), look(neuron.core).tensors()
    made = program_of("triton", neuron.core, sig, [Meta((5, 7), dtype)] * inputs + [None] * states, torch.device("cuda"), captured, None)
    made.differentiate(neuron.core, captured)
    return made


def plans(made: Program, dtype: torch.dtype, T: int) -> dict:
    """For T steps: inference, the forward that stores checkpoints, and the backward to all inputs."""
    dtypes = (dtype,) * made.sig.num_inputs
    wanted = [f"gx{k}" for k in range(made.sig.num_inputs)]
    cotangents = [f"gy{k}" for k in range(made.num_outputs)]
    found = {
        "inference": made.forward_plan(dtypes, False, False),
        "forward": made.forward_plan(dtypes, True, False),
        "backward": made.backward_plan(dtypes, wanted, cotangents),
    }
    return {kind: made.for_steps(T, plan) for kind, plan in found.items()}


def arrays(plan, T: int, N: int, checkpoints: int, pool: dict) -> list[Tensor | None]:
    """Random operands; initial states and cotangents of final states absent."""
    found: list[Tensor | None] = []
    for i, a in enumerate(plan.arguments):
        rows = {"sequence": T, "checkpoint": max(1, checkpoints), "row": 1, "param": 1}[a.kind]
        key = (i < len(plan.reads) and a.kind != "checkpoint", a.role, a.storage)
        if key not in pool or pool[key].numel() < rows * N:
            pool[key] = torch.randn(rows * N, device="cuda").add_(0.7).to(a.storage)
        found.append(None if a.kind == "row" and key[0] else pool[key][: rows * N].view(rows, N))
    return found


def launch(kernel: Kernel, given: list[Tensor | None], T: int, N: int) -> Callable[[], None]:
    kernel._expected.add(torch.cuda.current_device())  # builds of what is not measured would disturb
    run, there = kernel.bind([a is not None for a in given], T, N), [a for a in given if a is not None]
    return lambda: run(there, [])


def kernel_ms(plan, T: int, N: int, checkpoints: int, pool: dict, rep: int = 60) -> float:
    """Median device time of one launch, by events, the cache emptied before each."""
    from triton.testing import do_bench

    call = launch(load(plan, render_triton.render(plan)), arrays(plan, T, N, checkpoints, pool), T, N)
    call()
    return do_bench(call, warmup=10, rep=rep, return_mode="median")


def copy_rate() -> float:
    """Bytes read and written per second by a device copy of 512 MiB."""
    from triton.testing import do_bench

    source, target = torch.empty(2, 2**27, device="cuda")
    return 2 * 4 * 2**27 / do_bench(lambda: target.copy_(source), warmup=10, rep=100, return_mode="median") * 1e3


def sequence_bytes(plan) -> int:
    return sum(a.storage.itemsize for a in plan.arguments if a.kind == "sequence")


def measure_kernels() -> dict:
    rate, rows = copy_rate(), []
    for name, sizes in SIZES.items():
        made = {dtype: program(NEURONS[name], dtype) for _, _, dtype in sizes}
        for T, N, dtype in sizes:
            found, pool = plans(made[dtype], dtype, T), {}
            checkpoints = made[dtype].checkpoints(T)
            ms = {k: kernel_ms(p, T, N, checkpoints, pool) for k, p in found.items()}
            floor = {k: sequence_bytes(p) * T * N / rate * 1e3 for k, p in found.items()}
            row = {"core": name, "T": T, "N": N, "dtype": str(dtype)[6:], "chunk": found["backward"].chunk, "ms": ms, "floor_ms": floor}
            row["inference_of_bound"] = floor["inference"] / ms["inference"]
            row["training_of_bound"] = (floor["forward"] + floor["backward"]) / (ms["forward"] + ms["backward"])
            rows.append(row)
            training = ms["forward"] + ms["backward"]
            print(f"{name} {T}x{N} {row['dtype']}: inference {ms['inference']:.4f} ms = {row['inference_of_bound']:.0%} of the bound's rate,"
                  f" training {training:.4f} ms = {row['training_of_bound']:.0%}", flush=True)  # fmt: skip
            del pool
    return {"copy_bytes_per_s": rate, "copy_rate_after": copy_rate(), "rows": rows}


def measure_store() -> dict:
    """The states of every step stored (chunks of one step: nothing to recompute) against checkpoints."""
    rows = []
    for neuron, T, N in ((LIF_SIGMOID, 32, 802_816), (ADAPTIVE, 32, 802_816), (HH, 32, 802_816), (HH, 96, 32_768), (HH, 1024, 16_384)):
        made = program(neuron, F32)
        planned = made.chunk
        for chunk in sorted({1, 2, 4, planned}):
            made.chunk, pool = chunk, {}
            found = plans(made, F32, T)
            checkpoints = made.checkpoints(T)
            ms = sum(kernel_ms(found[k], T, N, checkpoints, pool, rep=30) for k in ("forward", "backward"))
            extra = checkpoints * len(neuron.rest) / (T * len(neuron.drive))
            rows.append(
                {"core": neuron.name, "T": T, "N": N, "chunk": chunk, "planned": planned, "training_ms": ms, "extra_over_input": extra}
            )
            print(f"store: {neuron.name} {T}x{N} K={chunk}{' (planned)' if chunk == planned else ''}: {ms:.4f} ms", flush=True)
    return {"rows": rows}


# --- whole calls -----------------------------------------------------------------------------------------------------------------
def wall(call: Callable[[], object], seconds: float = 0.5) -> float:
    """Median milliseconds of a call in batches of calls, the GPU synchronised after each batch."""
    return in_turns({"": call}, seconds)[""]


def in_turns(calls: dict[str, Callable[[], object]], seconds: float = 0.5) -> dict[str, float]:
    """As `wall`, of several calls, their batches in turns: the clock of a host changes from second to second."""
    batches = {}
    for call in calls.values():
        call()
    finish_builds()
    for name, call in calls.items():
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        batches[name] = max(1, min(100, int(0.02 / (time.perf_counter() - start))))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or any(len(found) < 3 for found in samples.values()):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(batches[name]):
                call()
            torch.cuda.synchronize()
            samples[name].append((time.perf_counter() - start) / batches[name] * 1e3)
    return {name: statistics.median(found) for name, found in samples.items()}


def graphed(call: Callable[[], object]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def operands(neuron: Neuron, T: int, N: int, dtype: torch.dtype = F32) -> tuple[list[Tensor], list[Tensor]]:
    inputs = [torch.randn(T, N, device="cuda").mul_(std).add_(mean).to(dtype) for mean, std in neuron.drive]
    return inputs, [torch.randn(T, N, device="cuda").to(dtype) for _ in range(neuron.outputs)]


def steps(
    neuron: Neuron, inputs: list[Tensor], cotangents: list[Tensor], run: candidates.Run | None = None, layer: flexsn.FlexSN | None = None,
) -> tuple[Callable, Callable]:  # fmt: skip
    """One inference and one training step, through a module of flexsn's (by default `FlexSN` of the neuron's core) or a peer."""
    layer = layer or flexsn.FlexSN(neuron.core, num_states=len(neuron.rest), strict=True)
    own = list(layer.parameters())
    states = [torch.full(inputs[0].shape[1:], value, device="cuda", dtype=inputs[0].dtype) for value in neuron.rest]

    def whole(xs):
        if run is not None:
            return run(xs, states)
        layer.reset()
        ys = layer(*xs)
        return ys if isinstance(ys, tuple) else (ys,)

    leaves = [x.detach().clone().requires_grad_() for x in inputs]

    def inference():
        with torch.no_grad():
            return whole(inputs)

    def training():
        ys = whole(leaves)
        return ys, torch.autograd.grad(ys, [*leaves, *own], cotangents)

    return inference, training


class Doubled(torch.autograd.Function):
    """The least that a step through Python costs on a machine: one kernel per direction and nothing to decide."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def on_one_thread(training: Callable[[], object]) -> Callable[[], object]:
    """The same, its backward on the thread that calls, not on the one that autograd keeps for the GPU."""

    def step():
        with torch.autograd.set_multithreading_enabled(False):
            return training()

    return step


def measure_calls() -> dict:
    rows = []
    for T, N in ((4, 1024), (32, 802_816), (96, 32_768), (1024, 16_384)):
        inputs, cotangents = operands(LIF_SIGMOID, T, N)
        inference, training = steps(LIF_SIGMOID, inputs, cotangents)
        leaf = inputs[0].detach().clone().requires_grad_()
        calls: dict[str, Callable[[], object]] = {
            "inference": inference,
            "training": training,
            "function": lambda leaf=leaf, gs=cotangents: torch.autograd.grad(Doubled.apply(leaf), leaf, gs),
        }
        calls["operator"] = lambda leaf=leaf, gs=cotangents: torch.autograd.grad(leaf * 2, leaf, gs)
        calls |= {f"{name}_one_thread": on_one_thread(calls[name]) for name in ("training", "function", "operator")}
        if T == 4:
            for name, layer in (("zoo", flexsn.neurons.LIF()), ("learned", flexsn.neurons.LIF(learn_tau=True))):
                calls[f"{name}_inference"], calls[f"{name}_training"] = steps(LIF_SIGMOID, inputs, cotangents, layer=layer.cuda())
        row = {"T": T, "N": N} | {f"{name}_ms": ms for name, ms in in_turns(calls).items()}
        row |= {"inference_graph_ms": wall(graphed(inference)), "training_graph_ms": wall(graphed(training))}
        rows.append(row)
        print("calls:", {k: round(v, 4) for k, v in row.items()}, flush=True)
    return {"rows": rows}


def peer_runs(neuron: Neuron, T: int) -> dict[str, Callable[[], candidates.Run]]:
    found: dict[str, Callable[[], candidates.Run]] = {"hand_loop": lambda: candidates.hand_loop(neuron)}
    if candidates.spikingjelly:
        found["sj_lifnode"] = lambda: candidates.sj_lifnode(neuron)
        if T <= 32:
            found["sj_flexsn"] = lambda: candidates.sj_flexsn(neuron)
    if T <= 32:
        found["compiled_loop"] = lambda: torch.compile(candidates.hand_loop(neuron), fullgraph=True, dynamic=False)
    found["torch_scan"] = lambda: candidates.torch_scan(neuron, "training")
    return {key: make for key, make in found.items() if PEERS_ASKED is None or key in PEERS_ASKED}


def measure_peers() -> dict:
    rows = []
    for T, N, skip in ((32, 802_816, ()), (96, 32_768, ("torch_scan",)), (1024, 16_384, ("hand_loop", "torch_scan"))):
        inputs, cotangents = operands(LIF_SIGMOID, T, N)
        inference, training = steps(LIF_SIGMOID, inputs, cotangents)
        (spikes,), (grad,) = training()
        row: dict = {"T": T, "N": N, "peers": {"flexsn": {"inference_ms": wall(inference), "training_ms": wall(training)}}}
        for key, make in peer_runs(LIF_SIGMOID, T).items():
            if key in skip:
                continue
            start = time.perf_counter()
            try:
                torch._dynamo.reset()
                other_inference, other_training = steps(LIF_SIGMOID, inputs, cotangents, make())
                with torch.no_grad():
                    other_inference()
                (ys, gs), _ = other_training(), torch.cuda.synchronize()
                first = time.perf_counter() - start
                peer = {"inference_ms": wall(other_inference), "training_ms": wall(other_training), "first_calls_s": first}
                peer |= {
                    "spikes_equal": float((ys[0] == spikes).float().mean()),
                    "gradient_error": float((gs[0] - grad).norm() / grad.norm()),
                }
                row["peers"][key] = peer
                del ys, gs
            except Exception as error:  # a peer may fail in any way: the report says how
                row["peers"][key] = {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}
            print(f"peers {T}x{N} {key}: {row['peers'][key]}", flush=True)
        print(f"peers {T}x{N} flexsn: {row['peers']['flexsn']}", flush=True)
        rows.append(row)
    return {"rows": rows}


# --- memory, compile, workload ------------------------------------------------------------------------------------------------------
def peak(training: Callable[[], object], x: Tensor) -> dict:
    """Bytes that a step allocates at its peak, and those beyond its output and gradient over the bytes of the input `x`."""
    training()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = training()
    found = torch.cuda.max_memory_allocated() - before
    del kept
    return {"peak_bytes": found, "extra_over_input": (found - 2 * x.nbytes) / x.nbytes}


def measure_lengths() -> dict:
    """Memory by T, at about as many neuron-steps each: whole chunks and not."""
    rows = []
    for T in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16, 17, 31, 32, 100, 1000):
        N = 2**25 // T // 256 * 256
        row: dict = {"T": T, "N": N, "extra_over_input": {}}
        for dtype in (F32, F16):
            inputs, cotangents = operands(LIF_SIGMOID, T, N, dtype)
            _, training = steps(LIF_SIGMOID, inputs, cotangents)
            row["extra_over_input"][str(dtype)[6:]] = peak(training, inputs[0])["extra_over_input"]
        print("lengths", row, flush=True)
        rows.append(row)
    return {"rows": rows}


def measure_memory() -> dict:
    T, N = 32, 802_816
    inputs, cotangents = operands(LIF_SIGMOID, T, N)
    found = {}
    for key, make in {"flexsn": lambda: None, **peer_runs(LIF_SIGMOID, T)}.items():
        if key in ("compiled_loop", "torch_scan"):
            continue
        _, training = steps(LIF_SIGMOID, inputs, cotangents, make())
        try:
            found[key] = peak(training, inputs[0])
        except Exception as error:  # a peer may fail in any way: the report says how
            if key == "flexsn":
                raise
            found[key] = {"failed": str(error)[:200]}
        print("memory", key, found[key], flush=True)
    return {"T": T, "N": N, "peers": found}


CHILD = """
import json, sys, time
start = time.perf_counter(); import torch; torch.randn(3, device="cuda").sum().item(); torch.cuda.synchronize()
found = {"torch_s": time.perf_counter() - start}
T = int(sys.argv[1]); sys.path.insert(0, sys.argv[2])
if len(sys.argv) > 3:
    from torch._subclasses.fake_tensor import FakeTensorMode
    import torch._refs, torch._dynamo
    from torch.utils._python_dispatch import TorchDispatchMode
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None): return func(*args, **(kwargs or {}))
    with Mode(): torch.ones(2) + 1
    with FakeTensorMode(): a = torch.ones(3, device="cuda", requires_grad=True); (a * 2).sum().backward()
start = time.perf_counter()
import flexsn, cores, triton
found["import_s"] = time.perf_counter() - start
def step(T, N):
    x = torch.randn(T, N, device="cuda", requires_grad=True)
    torch.cuda.synchronize(); start = time.perf_counter()
    y = flexsn.scan(cores.lif_sigmoid, [x], [None], strict=True).outputs[0]
    torch.autograd.grad(y, x, torch.ones_like(y)); torch.cuda.synchronize()
    return time.perf_counter() - start
def beyond(T, N):
    first = step(T, N)
    return first - min(step(T, N), step(T, N))
def builds():
    return sum(len(kernel._builds) for kernel in flexsn._runtime.triton.kernel._kernels.values())
found["first_s"] = step(T, 4096)
found["other_classes_s"] = {str(n): beyond(8, n) for n in (1 << 20, (1 << 20) + 1)}
start = time.perf_counter(); flexsn._runtime.triton.kernel.finish_builds(); found["then_all_built_s"] = time.perf_counter() - start
built = builds()
new = {
    "T": [(T + k, 4096) for k in (1, 2, 3)], "N": [(T, 4096 * k) for k in (2, 3, 4)], "T and N": [(T + 3 + k, 160 * k) for k in (1, 2, 3)],
    "many neurons": [(9, k << 18) for k in (1, 2, 3)], "many, not aligned": [(9, (k << 18) + 1) for k in (1, 2, 3)],
}
found["new_sizes_s"] = {kind: [beyond(t, n) for t, n in sizes] for kind, sizes in new.items()}
found["built"] = [built, builds()]
print(json.dumps(found))
"""


def first_calls(T: int, cache: str) -> dict:
    """What `CHILD` finds in a process of its own, with a cache on disk."""
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": cache,
        "FLEXSN_CACHE_DIR": cache,
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, "-c", CHILD, str(T), str(ROOT / "benchmarks"), "apart"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def measure_compile() -> dict:
    rows = []
    for T in (4, 65536):
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm", "warm"):
                rows.append({"T": T, "cache": state, **first_calls(T, cache)})
                print("compile", rows[-1], flush=True)
    return {"rows": rows}


def measure_workload() -> dict:
    """Linear + LIF, batch 16, 500 steps, 16,384 neurons, forward and backward: the neuron against ReLU in its place."""
    T, batch, N = 500, 16, 16_384
    rows = []
    for dtype in (F16, F32):
        linear = torch.nn.Linear(N, N, device="cuda", dtype=dtype)
        x = torch.randn(T, batch, N, device="cuda", dtype=dtype)
        lif = flexsn.FlexSN(cores.lif_sigmoid, num_states=1, strict=True)
        layers: dict[str, Callable] = {"relu": torch.relu, "flexsn": lambda z, lif=lif: (lif.reset(), lif(z))[1]}
        if candidates.spikingjelly:
            sj = candidates.sj_lifnode(LIF_SIGMOID)
            layers["sj_lifnode"] = lambda z, sj=sj: sj([z], [])[0]
        row: dict = {"dtype": str(dtype)[6:], "T": T, "batch": batch, "N": N, "ms": {}}
        for key, layer in layers.items():

            def step(layer=layer, linear=linear, x=x):
                linear.zero_grad()
                y = layer(linear(x))
                y.backward(torch.ones_like(y))

            try:
                row["ms"][key] = wall(step, seconds=3)
            except Exception as error:  # a peer may fail in any way: the report says how
                if key != "sj_lifnode":
                    raise
                row["ms"][key] = f"failed: {str(error)[:200]}"
        rows.append(row)
        print("workload", row, flush=True)
        del linear, x
    return {"rows": rows}


def measure_cupy() -> dict:
    """SpikingJelly's LIFNode on its CuPy kernels, beside flexsn: in a process that sees that version of it."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "cupy.json"
        command = [sys.executable, __file__, "--output", str(output), "--only", "peers", "workload", "--peers", "sj_lifnode"]
        path = f"{os.environ['CUPY_SITE']}:{os.environ.get('PYTHONPATH', '')}"
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path})
        return json.loads(output.read_text())


def run_tests() -> dict:
    """The parity matrix and the GPU's own tests, with operands on the GPU."""
    command = [sys.executable, "-m", "pytest", "-q", *"-p no:cacheprovider -p no:benchmark --device cuda".split()]
    command += [*"-n 12 tests/operator/test_parity.py tests/gpu/test_gpu.py".split()]
    try:
        import xdist  # noqa: F401  whether it is there
    except ImportError:
        command = [c for c in command if c not in ("-n", "12")]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout[-4000:], done.stderr[-1000:], flush=True)
    found = {"command": " ".join(command[1:]), "exit": done.returncode, "summary": done.stdout.strip().splitlines()[-1]}
    table = [sys.executable, "tools/op_table.py", "--backend", "triton", "--device", "cuda", "--jobs", "12"]
    done = subprocess.run(
        table,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
    )
    print(done.stdout[-3000:], done.stderr[-1000:], flush=True)
    return found | {
        "op_table_exit": done.returncode,
        "op_table": done.stdout.strip().splitlines()[-20:],
        "took_s": time.perf_counter() - start,
    }


PARTS = {"kernels": measure_kernels, "calls": measure_calls, "memory": measure_memory, "lengths": measure_lengths, "compile": measure_compile, "workload": measure_workload,
         "store": measure_store, "tests": run_tests, "peers": measure_peers, "cupy": measure_cupy}  # fmt: skip


def machine() -> dict:
    import platform
    from importlib.metadata import version

    import triton

    properties = torch.cuda.get_device_properties(0)
    found = {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30),
    }
    found |= {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    found |= {
        "cuda": torch.version.cuda,
        "flexsn": flexsn.__version__,
        "spikingjelly": version("spikingjelly") if candidates.spikingjelly else "absent",
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", required=True)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=[p for p in PARTS if p != "cupy" or "CUPY_SITE" in os.environ])
    parser.add_argument("--peers", nargs="*", help="of the part `peers`: these alone")
    options = parser.parse_args()
    global PEERS_ASKED
    PEERS_ASKED = options.peers
    target = Path(options.output)
    document = json.loads(target.read_text()) if target.exists() else {}
    document["machine"] = machine()
    torch.manual_seed(0)
    failed = []
    for part in options.only:
        start = time.perf_counter()
        try:
            document[part] = PARTS[part]()
            document[part] |= {"took_s": time.perf_counter() - start, "date": datetime.date.today().isoformat()}
            document[part]["spikingjelly"] = document["machine"]["spikingjelly"]  # a later run of other parts may lack it
        except Exception:  # the other parts are still worth having; the exit code shows the failure, and no page is made of it
            failed.append(part)
            document[part] = {"failed": traceback.format_exc()[-2000:]}
            print(document[part]["failed"], flush=True)
        torch.cuda.empty_cache()
        target.write_text(json.dumps(document, indent=1))
        print(f"--- {part}: {time.perf_counter() - start:.0f} s", flush=True)
    if failed or document.get("tests", {}).get("exit") or document.get("tests", {}).get("op_table_exit"):
        sys.exit(f"failed: {', '.join(failed) or 'tests'}")


if __name__ == "__main__":
    main()
