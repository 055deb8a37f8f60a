"""What tells Dynamo of functions and modules without importing it, each with the versions in which it was seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def unseen_by_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function: where it runs inside a compiled region, Dynamo compiles neither it nor what it calls."""
    try:
        from torch._C._dynamo import eval_frame  # 2.11, 2.14

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    except (ImportError, AttributeError):  # `interfaces.require` says so before a neuron is compiled
        pass
    return function


def is_compiled(module: torch.nn.Module) -> bool:
    """Made by `torch.compile(module)`, or after `module.compile()`."""
    return is_optimized_module(module) or module._compiled_call_impl is not None  # 2.13


def is_optimized_module(module: torch.nn.Module) -> bool:
    """Made by `torch.compile(module)`."""
    return hasattr(module, "_orig_mod")  # 2.13


def outside_dynamo(reason: str) -> Callable[[Callable], Callable]:
    """A decorator: inside a compiled region the call breaks the graph and runs as it is. (`torch.compiler.disable` imports Dynamo.)"""

    def mark(function: Any) -> Callable:
        function._torchdynamo_disable = True  # 2.11, 2.14
        function._torchdynamo_disable_msg = reason  # 2.11, 2.14
        return unseen_by_dynamo(function)

    return mark
