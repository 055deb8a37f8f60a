"""What is explained: a core with operands like those of one call, from whatever the user gave."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from .._capture.signature import Signature, check_operands, core_name, make_signature, positional_names
from .._captured.captured_values import CapturedValues, look
from .._operator.call import upcast
from .._operator.mixing.cut import Cut
from .._operator.mixing.one_step import Given
from .._operator.mixing.run import run_mixing, with_walks
from .._operator.prepare import CoreCall
from .._runtime.fork import autocast_dtype
from .._torch.transforms import is_plain
from ..errors import OperandCountError, OperandTypeError
from ..module import FlexSN
from .dependency import pieces_of
from .model import Piece


@dataclass
class Subject:
    """A core and operands for one call.

    Attributes:
        seen: what the core captures.
        inputs: leaves; floating ones require grad, unless the module cuts them off.
        states: initial states, None for default ones.
        backend: as the user named it.
        bare: an `nn.Module` that is no `FlexSN` and holds none, taken for a core.
        around: the pieces of a core that mixes neurons, of which this is one.
    """

    core: Callable[..., Any]
    sig: Signature
    seen: CapturedValues
    inputs: tuple[Tensor, ...]
    states: tuple[Tensor | None, ...]
    params: tuple[Tensor, ...]
    backend: str
    num_outputs: int | None = None
    bare: bool = False
    around: list[Piece] = field(default_factory=list)

    @property
    def captured(self) -> dict[str, Tensor]:
        return self.seen.tensors()

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.asked().tensors

    def asked(self, backend: str = "auto") -> CoreCall:
        """Return the call."""
        return CoreCall(self.core, self.seen, self.sig, self.inputs, self.states, self.params, self.captured, self.num_outputs, backend)


def subject_of(
    target: Callable[..., Any], example: Sequence[Tensor], states: Sequence[Tensor | None] | None, params: Sequence[Tensor],
    backend: str | None,
) -> Subject:  # fmt: skip
    """Settle the operands of a call.

    Raises:
        OperandCountError, OperandTypeError, SequenceLengthError, ...: the operands do not fit the core.
    """
    if not callable(target):
        raise OperandTypeError(
            f"a core is a callable or a `flexsn.FlexSN`, not {type(target).__name__}", hint="Write `flexsn.explain(core, x)`."
        )
    for name, given in (("states", states), ("params", params)):
        if given is not None and not isinstance(given, (list, tuple)):
            what = "tensors, or None for zeros" if name == "states" else "tensors"
            hint = f"Write `{name}=({'None' if name == 'states' else 'p'},)`, one for each."
            raise OperandTypeError(
                f"`{name}` must be a tuple or list of {what}, not {type(given).__name__}", core=core_name(target), hint=hint
            )
    if isinstance(target, FlexSN):
        made = _of_module(target, example, states, params, backend)
    else:
        made = _of_core(target, example, states, params, backend or "auto")
    check_operands(made.sig, made.inputs, made.states, made.params)
    return made


def on_parts(subject: Subject, look: CapturedValues) -> Subject:
    """The same of the core on parts of its operands, which `look` is a look at."""
    layout = look.wrap
    inputs, states = layout.split(subject.inputs, subject.states)
    leaves = tuple([_leaf(x, x.requires_grad) for x in inputs])
    return dataclasses.replace(
        subject,
        sig=dataclasses.replace(layout.signature, exact=subject.sig.exact),
        seen=look,
        inputs=leaves,
        states=states,
        num_outputs=layout.num_outputs,
    )


def of_segment(subject: Subject, look: CapturedValues) -> Subject:
    """The same of the segment that a core that mixes neurons spends its time in; what other pieces give are zeros."""
    cut: Cut = look.wrap
    T, first, segment = subject.inputs[0].shape[0], subject.inputs[0], cut.main
    inputs = tuple([
        upcast(subject.inputs[k]) if kind == "x" else _leaf(first.new_zeros((T, *meta.shape), dtype=meta.dtype), True)
        for kind, k, i in segment.takes for meta in [segment.meta_of((kind, k, i))]
    ])  # fmt: skip
    pairs = [(subject.states[k], segment.meta_of(("v", k, 0))) for k in segment.states]
    states = tuple([first.new_zeros(m.shape, dtype=m.dtype) if v is None else upcast(v).expand(m.shape) for v, m in pairs])
    seen = look.wrapped(segment)
    changed: dict[str, Any] = {"inputs": inputs, "states": states, "num_outputs": len(segment.gives)}
    changed["around"] = pieces_of(cut, _loops(subject, look))
    return dataclasses.replace(subject, sig=segment.signature, seen=seen, **changed)


def _loops(subject: Subject, look: CapturedValues) -> dict[int, str]:
    """Run one step of a core that mixes neurons; return how its loops over time run, by the place of the piece."""
    backend = "auto" if subject.backend == "torch" else subject.backend
    first = [x.detach()[:1] for x in subject.inputs]
    given = Given(subject.core, look, first, subject.states, subject.params, backend, autocast_dtype(first[0].device.type))
    with torch.no_grad(), with_walks(found=[]):  # which walk now, whatever was noted of calls before
        run_mixing(given, False)
    return {key[1]: how for key, how in look.over_parts.items() if isinstance(key, tuple) and key[0] == "ran"}


def _of_module(module: FlexSN, example: Sequence[Any], states: Any, params: Sequence[Tensor], backend: str | None) -> Subject:
    name = core_name(module.core)
    if params:
        raise OperandCountError("a module has its own params", core=name, hint="Leave out `params=`.")
    if len(example) != module.num_inputs:
        raise OperandCountError(
            f"needs {module.num_inputs} inputs but was given {len(example)}", core=name, hint="Call `flexsn.explain(neuron, x)`."
        )
    _check_tensors(name, example)
    initial = module.start_states(*example) if states is None else states
    sequences = [x.unsqueeze(0) for x in example] if module.step_mode == "s" else list(example)
    flags = module.requires_grad_flags or (True,) * module.num_inputs
    own = tuple([getattr(module.params, n) for n in module.param_names])
    sig = make_signature(module.core, len(sequences), len(initial), len(own))
    sig = dataclasses.replace(sig, exact=module.exact)
    inputs = tuple([_leaf(x, wanted) for x, wanted in zip(sequences, flags, strict=False)])
    return Subject(module.core, sig, module.captured_values(), inputs, tuple(initial), own, backend or module.backend, module.num_outputs)


def _of_core(core: Callable, example: Sequence[Any], states: Any, params: Sequence[Tensor], backend: str) -> Subject:
    name = core_name(core)
    if not example:
        raise OperandCountError(
            "needs an example of every input", core=name, hint="Write `flexsn.explain(core, x)`, x of shape [T, *shape]."
        )
    _check_tensors(name, example)
    if states is None:
        names, required, open_ended = positional_names(core)
        if open_ended:
            raise OperandCountError(
                "takes `*args`, so its states cannot be counted", core=name, hint="Pass `states=(None,)`, one per state."
            )
        states = (None,) * max(0, (required or len(names)) - len(example) - len(params))
    sig = make_signature(core, len(example), len(states), len(params))
    inputs = tuple([_leaf(x, True) for x in example])
    return Subject(core, sig, look(core), inputs, tuple(states), tuple(params), backend, bare=isinstance(core, nn.Module))


def _check_tensors(name: str, example: Sequence[Any]) -> None:
    for i, x in enumerate(example):
        if not isinstance(x, Tensor):
            raise OperandTypeError(f"input {i} must be a tensor [T, *shape], not {type(x).__name__}", core=name)
        if x.is_meta or not is_plain(x):
            raise OperandTypeError(
                f"input {i} has no values", core=name, hint="Kernels are built and timed: pass a real tensor of its kind."
            )


def _leaf(x: Tensor, wanted: bool) -> Tensor:
    if x.is_inference():  # such a tensor can never require grad
        x = x.clone()
    return x.detach().requires_grad_(wanted and (x.dtype.is_floating_point or x.dtype.is_complex))


# --- the user's source ------------------------------------------------------------------------------------------------------------
def code_of(core: Any) -> CodeType | None:
    """The code that runs at every step, where it is written in Python."""
    while isinstance(core, partial):
        core = core.func
    core = inspect.unwrap(core)
    if isinstance(core, nn.Module):
        core = type(core).forward
    code = getattr(core, "__code__", None)
    return code if code is not None else getattr(type(core).__call__, "__code__", None)


def source_of(core: Any) -> tuple[str | None, list[tuple[int, str]]]:
    """`file:line` of the core, and its numbered lines; empty where there is no source."""
    code = code_of(core)
    if code is None:
        return None, []
    try:
        lines, first = inspect.getsourcelines(code)
    except (OSError, TypeError):
        return f"{code.co_filename}:{code.co_firstlineno}", []
    numbered = [(first + i, text.rstrip("\n")) for i, text in enumerate(lines)]
    indent = min((len(t) - len(t.lstrip()) for _, t in numbered if t.strip()), default=0)
    return f"{code.co_filename}:{first}", [(n, t[indent:]) for n, t in numbered]


def machine_facts() -> dict[str, str]:
    """Processor, threads and versions."""
    import platform
    from pathlib import Path

    from .._version import __version__

    info = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    )
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "threads": str(torch.get_num_threads()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "flexsn": __version__,
    }
