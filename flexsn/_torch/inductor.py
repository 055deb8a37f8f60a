"""Private names of Inductor, seen in 2.11 and 2.14: its lowerings and passes; imported where Inductor was, as importing it is slow."""

from collections.abc import Callable
from typing import Any

from torch._inductor import config
from torch._inductor.ir import BaseView as BaseView
from torch._inductor.ir import ComputedBuffer as ComputedBuffer
from torch._inductor.ir import FallbackKernel as FallbackKernel
from torch._inductor.ir import InputBuffer as InputBuffer
from torch._inductor.ir import TensorBox as TensorBox
from torch._inductor.ir import get_stride_order as get_stride_order
from torch._inductor.lowering import add_layout_constraint as add_layout_constraint
from torch._inductor.lowering import register_lowering as register_lowering
from torch._inductor.virtualized import V as V


def uses_cuda_graphs() -> bool:
    """Whether compiled graphs are recorded as CUDA graphs."""
    return config.triton.cudagraphs


def rewrite(operator: Any, change: Callable[[Any], None]) -> None:
    """Have every call of an operator, a node of a graph, changed before Inductor lowers the graph."""
    from torch._inductor.fx_passes.post_grad import pass_patterns
    from torch._inductor.pattern_matcher import CallFunctionVarArgs, register_graph_pattern

    at_each = register_graph_pattern(CallFunctionVarArgs(operator), pass_dict=pass_patterns[-1])
    at_each(lambda match, *_, **__: change(match.output_node()))
