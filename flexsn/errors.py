"""The mistakes flexsn knows, one class each.

Every message names the core, then the operand or op, then the user's source line, then what to write instead.
`CannotFuseError` and its children mark what PyTorch can run step by step but one fused kernel cannot: for these
`backend="auto"` takes the eager loop (and says so once), every other backend raises.
"""

from __future__ import annotations

import re
import sys
from typing import Any


def as_shown(line: str) -> str:
    """Return a `file:number: text` line as users know it: of a notebook, whose files are temporary ones, `cell In[7], line 3: text`."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)  # of IPython's cache of the cells that it has run
    found = re.match(r"(.*?):(\d+)(:.*|$)", line, re.DOTALL)
    named = name_of(found[1]) if name_of and found else None
    return f"{named[0].lower()} {named[1]}, line {found[2]}{found[3]}" if found and named else line


class FlexSNError(Exception):
    """Base of all errors raised by flexsn.

    Args:
        message: what is wrong, as one sentence.
        core: name of the core.
        line: the user's source line, as `file:number: text`.
        hint: what to write instead.
    """

    def __init__(self, message: str, *, core: str | None = None, line: str | None = None, hint: str | None = None):
        self.reason, self.core, self.line, self.hint = message, core, line, hint
        text = f"core `{core}`: {message}" if core else message
        if line:
            text += f"\n  at {as_shown(line)}"
        if hint:
            text += f"\n  {hint}"
        self.args = (text,)  # Dynamo cannot follow `super().__init__` here

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {"reason": self.reason, "core": self.core, "line": self.line, "hint": self.hint}
        return (_rebuild, (type(self), self.args, fields))


def _rebuild(cls: type[FlexSNError], args: tuple[str], fields: dict[str, str | None]) -> FlexSNError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


# --- the call is not one ---------------------------------------------------------------------------------------------
class ArgumentError(FlexSNError, TypeError, ValueError):
    """An argument of flexsn's own has a value that it does not take (`step_mode="multi"`, a core that is not callable)."""


# --- the call does not fit the core -------------------------------------------------------------------------------
class OperandCountError(FlexSNError, ValueError):
    """The core was given more or fewer inputs, states or params than it takes."""


class OperandTypeError(FlexSNError, TypeError):
    """An operand is not a dense, real PyTorch tensor."""


class SequenceLengthError(FlexSNError, ValueError):
    """Input sequences disagree on T, the number of time steps."""


class ShapeMismatchError(FlexSNError, ValueError):
    """Operands do not broadcast to one step shape."""


class DeviceMismatchError(FlexSNError, ValueError):
    """Operands lie on different devices."""


class ReturnCountError(FlexSNError, ValueError):
    """The core returned another number of values than outputs + states."""


class ReturnTypeError(FlexSNError, TypeError):
    """The core returned nothing, or something that is not a tensor."""


class StateMismatchError(FlexSNError, ValueError):
    """A state changes its shape or dtype from one step to the next."""


class OperandMutationError(FlexSNError, ValueError):
    """The core writes into an input, state or param in place."""


class CoreError(FlexSNError, RuntimeError):
    """PyTorch refuses an op inside the core (shapes that do not broadcast, dtypes that do not mix)."""


class GraphCaptureError(FlexSNError, ValueError):
    """AOTAutograd could not capture a function as a graph (`flexsn.lowlevel`), or the graph does not fit the counts."""


class TorchScriptError(FlexSNError, RuntimeError):
    """`torch.jit.trace`, or an exporter that stands on it, records a call."""


class DoubleBackwardError(FlexSNError, RuntimeError):
    """A second derivative that there is none of: of a backward that is not linear, of a low-level kernel, of PyTorch's `scan`."""


class MissingGradientError(FlexSNError, RuntimeError):
    """What holds no gradient is differentiated: a program that was exported without it, an operator for inference alone."""


class FreedGraphError(FlexSNError, RuntimeError):
    """A backward through a fused call whose graph an earlier backward freed: mostly, states were carried over from it."""


class UnsupportedDtypeError(FlexSNError, TypeError):
    """An operand or intermediate has a dtype that flexsn does not handle (complex32, quantised, ...)."""


# --- the core is fine in PyTorch, but one kernel cannot express it --------------------------------------------------
class CannotFuseError(FlexSNError, NotImplementedError):
    """Base of what the eager loop can run and a fused kernel cannot."""


class NotElementwiseError(CannotFuseError):
    """A time-dependent op mixes neurons (`v.mean()`, `x @ w`, `cumsum`, `view`)."""


class UnsupportedOpError(CannotFuseError):
    """An elementwise op that has no rule in the closed op set."""


class RandomOpError(CannotFuseError):
    """The core draws random numbers."""


class ScalarReadError(CannotFuseError):
    """The core turns a tensor into a Python value (`.item()`, `float(w)`, `.tolist()`), which would freeze it."""


class ControlFlowError(CannotFuseError):
    """Python control flow depends on the value of a tensor (`if v.max() > 1:`)."""


class CapturedMutationError(CannotFuseError):
    """The core writes in place into a tensor that it captured (closure, global, module buffer)."""


class CapturedTensorError(CannotFuseError):
    """The core uses a tensor that requires grad and that no closure, global or attribute leads to."""


class SideEffectError(CannotFuseError):
    """The core changes Python values that it reads (`self.t += 1`, `self.v = v`): a kernel would do it once, not at every step."""


class ForwardModeError(CannotFuseError):
    """Forward-mode AD of a compiled call, an exported program or a low-level operator."""


class InPlaceError(CannotFuseError):
    """An in-place write whose aliases cannot be followed."""


class StepByStepError(CannotFuseError):
    """`over_time` cannot run all steps of a network at once."""


class ParamGradientError(CannotFuseError):
    """The gradient of a param passes a non-linear function of the per-step cotangent, so it cannot be summed first."""


class UnsupportedValueError(CannotFuseError):
    """The core meets a tensor on its way that no kernel takes (float8, sparse, of a class that overrides operators)."""


# --- the machine cannot do it ---------------------------------------------------------------------------------------
class BackendError(FlexSNError, ValueError):
    """An unknown backend, or one that does not serve this device."""


class BackendUnavailableError(FlexSNError, RuntimeError):
    """The backend exists but cannot run here: no compiler, or no place from which kernels may run."""


class BuildError(FlexSNError, RuntimeError):
    """The system compiler rejected a generated kernel."""


class FallbackWarning(UserWarning):
    """`backend="auto"` runs the eager loop, and why."""


class CapturedValueWarning(UserWarning):
    """A core captures something that flexsn takes as it is at the capture and does not compare later (an array, a set, another library's
    object)."""


class InterfaceWarning(UserWarning):
    """An internal interface of PyTorch that flexsn relies on has moved, and what does not work therefore."""


class ProgramTextError(FlexSNError, RuntimeError):
    """The program that a saved graph carries cannot be read."""


class CarriedStateError(FlexSNError, RuntimeError):
    """Carried states are not what the call needs: in an export they would be constants of the program, and a call that an
    activation checkpoint runs again may have started from others."""


class StaleStateError(FlexSNError, RuntimeError):
    """A state was left by a trace or a `torch.func` transform that has ended: it has no values."""


class ShardingError(FlexSNError, ValueError):
    """DTensors that are laid out over the device mesh in a way that a neuron cannot run (time sharded, plain and distributed mixed)."""


class PiecesError(FlexSNError, ValueError):
    """A sequence in pieces that cannot be read as the call needs it."""


class DecomposeError(FlexSNError, RuntimeError):
    """An exported program cannot be written without flexsn's operators."""


# --- looking inside ---------------------------------------------------------------------------------------------------
class PictureError(FlexSNError, ValueError):
    """Data that a picture cannot show: another number of dimensions, shapes that differ (`flexsn.plot`)."""


class MonitorError(FlexSNError, ValueError):
    """`flexsn.monitor` is asked for a layer, a state or a record that is not there."""


# --- models of other libraries -----------------------------------------------------------------------------------------
class InterchangeError(FlexSNError, ValueError):
    """A model that cannot be written as NIR, or a NIR graph that cannot be read; the message names the node."""
