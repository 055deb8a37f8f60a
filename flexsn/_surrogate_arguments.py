"""Settings of surrogates: what they may be, and how a function of `x` and settings becomes a surrogate that checks them."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._torch.transforms import is_plain
from .errors import ArgumentError, OperandTypeError, ParamGradientError


class Rule(NamedTuple):
    """What a setting has to be, in words and as a test; `broadcasts`: a tensor may stand for a number."""

    words: str
    holds: Callable[[Any], bool]
    broadcasts: bool = False


def _number(value: Any) -> bool:
    """A finite number of Python or numpy; no bool."""
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or (hasattr(value, "__float__") and not getattr(value, "ndim", 0))):
        return False
    return value == value and abs(value) != math.inf


def _integer(value: Any) -> bool:
    """Of Python or numpy; no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _range(value: Any) -> bool:
    """A pair of numbers or tensors, the first below the second."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    given = [v for v in value if not isinstance(v, Tensor)]
    real = all(_number(v) or (isinstance(v, float) and abs(v) == math.inf) for v in given)
    return real and (len(given) < 2 or value[0] < value[1])


FINITE = Rule("a finite number", _number, True)
POSITIVE = Rule("a finite number above 0", lambda v: _number(v) and v > 0, True)
NOT_NEGATIVE = Rule("a finite number, 0 or above", lambda v: _number(v) and v >= 0, True)
NOT_ZERO = Rule("a finite number other than 0", lambda v: _number(v) and v != 0, True)
ABOVE_ONE = Rule("a finite number above 1", lambda v: _number(v) and v > 1, True)
COUNT = Rule("an int, 1 or above", lambda v: _integer(v) and v >= 1)
TERMS = Rule("an int, 2 or above: its gradient has n - 1 terms", lambda v: _integer(v) and v >= 2)
HEIGHT = Rule("None or a finite number above 0", lambda v: v is None or (_number(v) and v > 0), True)
WINDOW = Rule("None or a pair of numbers, the first below the second", lambda v: v is None or _range(v))
FUNCTION = Rule("a function of x", lambda v: callable(v) and not isinstance(v, Tensor))
NOISE = Rule("a tensor, torch.rand_like(x) of the whole sequence", lambda v: isinstance(v, Tensor))
SOME_SLOPE = Rule("leak or k to be other than 0", lambda s: any(isinstance(v, Tensor) or v for v in (s["leak"], s["k"])))
FLAG = Rule("True or False", lambda v: isinstance(v, bool))


def _check(spike: str, rules: dict[str, Rule], settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        rule = rules.get(name)
        if rule is None:
            raise ArgumentError(f"{spike} has no setting `{name}`; it takes {', '.join(rules) or 'none'}")
        if isinstance(value, Tensor) and rule.broadcasts:
            if value.requires_grad and torch.is_grad_enabled():
                refuse_learned(spike, f"setting `{name}`", value)
        elif not rule.holds(value):
            raise ArgumentError(f"{spike} needs {name} to be {rule.words}, not {value!r}")


def _check_tensors(spike: str, rules: dict[str, Rule], settings: dict[str, Any]) -> None:
    """Every value of them: once, when the surrogate is made, as this reads memory."""
    if torch.compiler.is_dynamo_compiling():
        return
    for name, value in settings.items():
        if isinstance(value, Tensor) and rules[name].broadcasts and is_plain(value):
            for number in value.detach().flatten().tolist():
                if not rules[name].holds(number):
                    raise ArgumentError(f"{spike} needs {name} to be {rules[name].words}, but the tensor has a value of {number!r}")


def refuse_learned(spike: str, what: str, value: Tensor) -> None:
    """Every operand of a traced core requires grad: there the eager loop can tell."""
    traced = type(value) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    raise (ParamGradientError if traced else ArgumentError)(
        f"{what} of {spike} {'depends on an operand' if traced else 'requires grad'}, but gets no gradient: no spike depends on it",
        hint=f"Write `.detach()`. To learn how steep a surrogate is, scale the distance to threshold: `{spike}(w * x)`.",
    )


def takes(together: Rule | None = None, /, **rules: Rule) -> Callable[[Callable[..., Tensor]], Callable[..., Any]]:
    """A function of `x` and settings, of which `rules` says what they may be, and `together` what all of them. Called without `x`,
    it returns itself with other settings."""

    def decorate(function: Callable[..., Tensor]) -> Callable[..., Any]:
        name, parameters = function.__name__, list(inspect.signature(function).parameters.values())[1:]
        names = [p.name for p in parameters]
        required = [p.name for p in parameters if p.default is p.empty]
        defaults = {p.name: p.default for p in parameters}
        checked = rules | {"inclusive": FLAG} if "inclusive" in names else rules

        @functools.wraps(function)
        def spike(x: Tensor | None = None, *args: Any, **settings: Any) -> Any:
            if len(args) > len(rules):
                raise ArgumentError(f"{name} takes {len(rules)} settings by position, but was given {len(args)}")
            placed = dict(zip(names, args, strict=False))
            if twice := [setting for setting in placed if setting in settings]:
                raise ArgumentError(f"{name} was given {', '.join(twice)} twice, by position and by name")
            settings |= placed
            _check(name, checked, settings)
            if together is not None and not together.holds(defaults | settings):
                raise ArgumentError(f"{name} needs {together.words}")
            if x is None:
                _check_tensors(name, checked, settings)
                return functools.partial(spike, **settings)
            if not isinstance(x, Tensor):
                raise OperandTypeError(
                    f"the surrogate {name} takes a tensor first, not {type(x).__name__}",
                    hint="Make it a tensor, `torch.as_tensor(value)`; settings go by name, as in `atan(alpha=3.0)`.",
                )
            for needed in required:
                if needed not in settings:
                    raise ArgumentError(f"{name} needs {needed}: {checked[needed].words}")
            return function(x, **settings)

        return spike

    return decorate
