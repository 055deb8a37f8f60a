"""Private names of Dynamo's variables, guards and errors, seen in 2.11 and 2.14; imported where Dynamo runs, as importing it is slow."""

from torch._dynamo import config
from torch._dynamo.exc import UncapturedHigherOrderOpError as UncapturedHigherOrderOpError
from torch._dynamo.exc import Unsupported as Unsupported
from torch._dynamo.guards import GuardBuilder as GuardBuilder
from torch._dynamo.guards import install_guard as install_guard
from torch._dynamo.source import AttrSource as AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslator as InstructionTranslator
from torch._dynamo.variables import higher_order_ops as _variables
from torch._dynamo.variables.base import VariableTracker as VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy as wrap_fx_proxy

constants = config.patch  # settings of Dynamo for a while
discard_graph_changes = _variables.discard_graph_changes
inlined = _variables._make_inlined  # type: ignore[attr-defined]  # imported there: a Python function, to be called with variables
LazyVariableTracker = _variables.LazyVariableTracker  # type: ignore[attr-defined]  # imported there
speculate_subgraph = _variables.speculate_subgraph
TorchHigherOrderOperatorVariable = _variables.TorchHigherOrderOperatorVariable
variable_classes = _variables._hop_name_to_variable_class  # of higher-order operators, by name
