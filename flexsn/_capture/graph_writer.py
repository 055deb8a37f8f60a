"""The graph that a recording writes: which node stands for a tensor, and which line of the user's made it."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx

from .._torch.fake_tensors import FakeTensor, disable_modes
from .._torch.tensors import unwatched
from ..errors import CapturedTensorError, DeviceMismatchError, FlexSNError, UnsupportedOpError, UnsupportedValueError
from .signature import COMPLEX, DTYPES, Signature, dtype_hint, not_dense
from .source_lines import INTERNAL, may_hold_cores, replayed


def run_core(core: Callable, operands: list[Tensor]) -> Any:  # a frame of its own: where the user's frames begin
    return core(*operands)


class Tape:
    """What is recorded so far.

    Attributes:
        graph: the nodes, in order.
        tracked: node of a tensor, by its `id`; the tensor is kept so that its id stays its own.
        real: captured tensors and their paths, by `id`.
        captured_nodes, captured_tensors: those that the core has used, by path.
        constants: tensors that the core made of Python values, by the name of their node.
        operand_names: of the nodes of operands.
        own: the `id` of each operand, and of each captured tensor.
        user_line: the line of the op that the user wrote, while it is being decomposed.
    """

    stops: tuple[CodeType, ...] = ()  # frames from which on nothing is the user's

    def __init__(self, sig: Signature, fake: Any, device: torch.device, captured: dict[str, Tensor]):
        super().__init__()
        self.sig, self.fake, self.device = sig, fake, device
        self.graph = fx.Graph()
        self.tracked: dict[int, tuple[Tensor, fx.Node]] = {}
        self.real: dict[int, tuple[Tensor, str]] = {}
        for path, tensor in captured.items():
            self.real.setdefault(id(tensor), (tensor, path))
        self.own = set(self.real)
        self.captured_nodes: dict[str, fx.Node] = {}
        self.captured_tensors: dict[str, Tensor] = {}
        self.constants: dict[str, Tensor] = {}
        self.operand_names: dict[fx.Node, str] = {}
        self.user_line: str | None = None

    def placeholder(self, fake: Tensor, name: str, kind: str) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta.update(kind=kind, val=fake.detach(), role=name)
        self.tracked[id(fake)] = (fake, node)
        self.operand_names[node] = name
        self.own.add(id(fake))
        return node

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node of a tensor; a real tensor met for the first time becomes an extra, static operand."""
        if id(tensor) in self.tracked:
            return self.tracked[id(tensor)][1]
        if isinstance(tensor, FakeTensor):
            raise FlexSNError(
                "uses a tensor left over from another run of the core", core=self.sig.core, line=self.line(),
                hint="A core must not keep tensors between steps except by returning them as states.",
            )  # fmt: skip
        _, path = self.real.get(id(tensor), (tensor, None))
        if path is None:
            return self.unnamed(tensor)
        if refusal := not_dense(tensor):
            raise UnsupportedValueError(
                f"captured tensor `{path}` must be a dense tensor, not {refusal[0]}", core=self.sig.core, line=self.line(), hint=refusal[1]
            )
        if tensor.dtype not in (*DTYPES, *COMPLEX):
            raise UnsupportedValueError(
                f"captured tensor `{path}` has dtype {tensor.dtype}", core=self.sig.core, line=self.line(), hint=dtype_hint(tensor.dtype)
            )
        if tensor.device != self.device and (tensor.dim() or tensor.device.type != "cpu"):
            raise DeviceMismatchError(
                f"captured tensor `{path}` is on {tensor.device} but the operands are on {self.device}",
                core=self.sig.core,
                line=self.line(),
            )
        with self.fake:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        node = self.graph.placeholder("captured_" + re.sub(r"\W", "_", path))
        node.meta.update(kind="static", val=fake, role=path)
        self.tracked[id(tensor)] = (tensor, node)
        self.captured_nodes[path] = node
        self.captured_tensors[path] = tensor
        return node

    def unnamed(self, tensor: Tensor) -> fx.Node:
        """A tensor that the core reached by no path that can be read again: bound as the object that it is."""
        if tensor.requires_grad:
            raise CapturedTensorError(
                "uses a tensor that requires grad and that flexsn cannot find again by name", core=self.sig.core, line=self.line(),
                hint="Pass it in `params`, or keep it in a closure variable, a global, or a module attribute.",
            )  # fmt: skip
        node = self.constant(tensor, fixed=False)
        self.tracked[id(tensor)] = (tensor, node)
        return node

    def constant(self, tensor: Tensor, *, fixed: bool = True) -> fx.Node:
        """A tensor made inside the core from Python values; or, not `fixed`, one of the user's, whose value may change."""
        if tensor.device.type == "meta":
            raise UnsupportedOpError("makes a tensor on the meta device, where it has no values", core=self.sig.core, line=self.line())
        name = f"constant_{len(self.constants)}"
        with self.fake:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        if fixed and tensor.dim() == 0 and not tensor.is_complex() and id(tensor) not in self.tracked:
            return self.uniform(fake, _number(lambda: tensor))
        node = self.graph.placeholder(name)
        node.meta.update(kind="static", val=fake, role=name)
        self.constants[name] = tensor
        return node

    def uniform(self, val: Tensor, value: Any, kind: str = "static", of: Sequence[str] = ()) -> fx.Node:
        """A tensor of one value: a number in the kernel. `step` if its shape is that of a step tensor; `of`: names of the
        cotangents that it was made from."""
        value = _number(lambda: torch.full((), value, dtype=val.dtype, device="cpu"))  # as the dtype holds it: 2.7 of an integer is 2
        kwargs: dict[str, Any] = {"dtype": val.dtype, "device": val.device}
        node = self.graph.create_node("call_function", torch.ops.aten.full.default, (list(val.shape), value), kwargs)
        node.meta.update(kind=kind, val=val, uniform=value, line=self.line(), **({"of": list(of)} if of else {}))
        return node

    def line(self) -> str | None:
        """`file:number: text` of the user's statement that is being executed."""
        if self.user_line is not None:
            return self.user_line
        if replayed.line is not None:
            return replayed.line
        frame: FrameType | None = sys._getframe(1)
        core: FrameType | None = None  # of a core that flexsn itself has: the outermost in a subpackage
        while frame is not None:
            name = frame.f_code.co_filename
            if frame.f_code is run_core.__code__:
                return None if core is None else _line_of(core)
            if frame.f_code in self.stops:
                return None
            if not name.startswith(INTERNAL) and not name.startswith("<eval_with_key>"):
                return _line_of(frame)
            core = frame if may_hold_cores(name) else core
            frame = frame.f_back
        return None

    def track(self, val: Any, node: fx.Node) -> Any:
        if isinstance(val, Tensor):
            self.tracked[id(val)] = (val, node)
        return val


def _number(make: Callable[[], Tensor]) -> Any:
    """The value of a tensor that nobody watches. (TorchScript and NumPy make tensors past PyTorch's functions: what watches these is on
    then.)"""
    with disable_modes(), unwatched():
        return make().item()


def getitem(value: Any, index: Any) -> Any:
    return value[index]


def _line_of(frame: FrameType) -> str:
    """`file:number: text` of the statement that a frame is at."""
    file, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, number).strip()
    return f"{file}:{number}" + (f": {text}" if text else "")
