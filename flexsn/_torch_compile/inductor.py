"""How Inductor, the back end of `torch.compile`, takes the kernel operators: as calls of the functions that implement them.

The private names that this stands on are in `_torch/inductor.py`, which is imported on use: `ir` below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._torch.aot_autograd import opname


def _viewed_outside(node: Any) -> bool:
    """Whether a view of a result is a result too, which AOTAutograd makes again from it as if it had the strides of the trace."""
    views = [user for user in node.users if any(r.alias_info for r in getattr(getattr(user.target, "_schema", None), "returns", ()))]
    return any(any(user.op == "output" for user in view.users) or _viewed_outside(view) for view in views)


_lowered: set[Any] = set()


def lower_to_calls(operators: Iterable[Any], copy: Any) -> None:
    """Tell Inductor how to lower operators, once.

    Args:
        operators: operators `(program, inputs, ...)`. Beside `torch.ops.<namespace>.<name>` stand `call_<name>`, the Python function
            that implements it, and `site_<name>`, which makes a site: a function for one place in generated code, where operands
            are of the same kinds in every call. Generated Python calls the one or the other, past PyTorch's dispatcher, which
            takes longer than a small kernel. Operands come in the order of memory of the first input, which what computes it
            chooses (channels last between convolutions).
        copy: an operator `copy(tensor)` that only CUDA graphs need; without them it is the tensor itself.
    """
    if copy in _lowered:
        return
    from .._torch import inductor as ir

    V = ir.V

    def in_memory(tensor: Any) -> Any:
        """A value of Inductor's, computed into memory in the order that suits what it is computed from."""
        tensor.realize()
        base = tensor.data.unwrap_view() if isinstance(tensor.data, ir.BaseView) else tensor.data
        if isinstance(getattr(base, "data", None), ir.ComputedBuffer):
            base.data.decide_layout()  # type: ignore[union-attr]  # of a StorageBox
        return ir.FallbackKernel.realize_input(tensor)

    def in_one_order(node: Any, program: str, inputs: Any, *others: Any) -> tuple[Any, dict[str, Any]]:
        first = in_memory(inputs[0])
        row = ir.get_stride_order(first.get_stride()[1:], V.graph.sizevars.shape_env)
        order = [len(row), *row]  # steps one after the other, also where a batch of one has the stride of time

        def same(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [same(v) for v in value]
            rank = len(value.get_size()) if isinstance(value, ir.TensorBox) else 0
            if rank == len(order):
                return ir.FallbackKernel.require_stride_order(value, order)
            return ir.FallbackKernel.require_stride_order(value, row) if rank and rank == len(row) else value

        return (program, [ir.FallbackKernel.require_stride_order(first, order), *same(inputs[1:])], *map(same, others)), {}

    def strides_asked() -> dict[Any, Any]:
        """Of results of the graph, the strides that they must have; None for any."""
        return V.graph.user_visible_output_strides  # 2.11, 2.14

    def outside(x: Any) -> Any:
        return ir.TensorBox.create(ir.FallbackKernel.create(copy, x))

    def keep(x: Any) -> Any:
        base = x.data.unwrap_view() if isinstance(x.data, ir.BaseView) else x.data
        if isinstance(getattr(base, "data", None), ir.InputBuffer):  # the caller's own tensor, with its autograd graph
            return outside(x)
        if not _viewed_outside(V.current_node):
            strides_asked()[V.current_node] = None
        return x

    class KernelCall(ir.FallbackKernel):
        """One line of generated code, which calls a function of `torch.ops.<namespace>`."""

        def codegen(self, wrapper: Any) -> None:
            operator: Any = self.op_overload
            namespace, packet = operator.namespace, opname(operator)
            if not V.graph.cpp_wrapper:
                self.python_kernel_name = f"torch.ops.{namespace}.call_{packet}"
                inputs: Sequence[Any] = self.inputs
                sizes = [n for value in inputs for n in (*(value.maybe_get_size() or ()), *(value.maybe_get_stride() or ()))]
                if not any(getattr(n, "free_symbols", None) for n in sizes):
                    site = f"{namespace}_{packet}_{self.get_name()}"
                    wrapper.define_kernel(site, f"torch.ops.{namespace}.site_{packet}()", gpu=False)
                    self.python_kernel_name = site
            super().codegen(wrapper)

    def lowering(operator: Any) -> Callable[..., Any]:
        def lower(*args: Any, **kwargs: Any) -> Any:
            results: Any = KernelCall.create(operator, *args, **kwargs)
            for result in results:
                result.skip_size_stride_alignment_checks = True  # 2.11, 2.14: a launch makes them as its fake kernel said
            for result in V.current_node.users:  # what is saved for the backward lies as it was written
                strides_asked().setdefault(result, None)
            return [ir.TensorBox.create(result) for result in results]

        return lower

    for operator in operators:
        ir.add_layout_constraint(operator, in_one_order)
        ir.register_lowering(operator, type_promotion_kind=None)(lowering(operator))
    ir.register_lowering(copy, type_promotion_kind=None)(lambda x: outside(x) if ir.uses_cuda_graphs() else keep(x))
    _lowered.add(copy)
