"""What a type checker sees of the zoo: a wrong argument is an error in a user's project, before anything runs."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import flexsn
from flexsn import neurons
from flexsn.neurons.base import Options

ROOT = Path(flexsn.__file__).parent.parent
ZOO = {
    n: c
    for n, c in vars(neurons).items()
    if isinstance(c, type) and issubclass(c, neurons.Neuron) and c is not neurons.Neuron and n == c.__name__
}


def written(cls):
    """The `__init__` that type checkers see: parameters and defaults, as text, and what it takes beside them."""
    tree = ast.parse(Path(inspect.getsourcefile(cls)).read_text())
    body = next(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls.__name__)
    checked = next(n for n in body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    (init,) = checked.body
    names = [a.arg for a in init.args.args[1:]]
    return list(zip(names, map(ast.unparse, init.args.defaults), strict=True)), ast.unparse(init.args.kwarg.annotation)


@pytest.mark.parametrize("name", ZOO)
def test_type_checkers_see_the_signature_that_is_there(name):
    parameters = inspect.signature(ZOO[name]).parameters.values()
    shown = [(p.name, getattr(p.default, "__name__", repr(p.default))) for p in parameters if p.name not in Options.__annotations__]
    assert written(ZOO[name]) == (shown, "Unpack[Options]")


def test_options_are_those_of_neurons():
    taken = [p for p in inspect.signature(neurons.Neuron.__init__).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert {p.name: p.annotation for p in taken} == {n: a.__forward_arg__ for n, a in Options.__annotations__.items()}


RIGHT = """
import torch

import flexsn

x = torch.rand(5, 3)
flexsn.LIF(3.0, v_reset="never", learn_tau=True, bounds={"tau": (1.0, None)})
flexsn.LIF(tau=torch.tensor(2.0), surrogate=flexsn.surrogate.sigmoid(alpha=4.0), step_mode="s", stateful="detached")
flexsn.ParametricLIF(2.5, v_threshold=0.5, per_channel=4)
flexsn.ALIF(beta=0.3, initial_states=[None, 0.1])
flexsn.FlexSN(lambda x, v: (x, v), num_states=1, stateful=False)(x)
"""
WRONG = {
    "flexsn.LIF(beta=0.9)": '"beta"',
    "flexsn.LIF(threshold=1.0)": '"threshold"',
    "flexsn.LIF(tau='2')": 'incompatible type "str"',
    "flexsn.LIF(learn_tau=1.5)": 'incompatible type "float"',
    "flexsn.LIF(tau=2.0, nonsense=3)": '"nonsense"',
    "flexsn.ParametricLIF(w=0.0)": '"w"',
    "flexsn.HodgkinHuxley(tau=2.0)": '"tau"',
    "flexsn.FlexSN(lambda x, v: (x, v), states=1)": '"states"',
}


@pytest.mark.slow
def test_mypy_sees_wrong_arguments(tmp_path):
    """Each line of a user's file alone; what is right passes."""
    pytest.importorskip("mypy")
    file = tmp_path / "use.py"
    file.write_text("\n".join([RIGHT.strip(), *WRONG]) + "\n")
    first = len(file.read_text().splitlines()) - len(WRONG) + 1
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "--follow-imports=silent", "use.py"],
        cwd=tmp_path, env={"MYPYPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    errors = {int(line.split(":")[1]): line for line in done.stdout.splitlines() if ": error: " in line}
    assert sorted(errors) == list(range(first, first + len(WRONG))), done.stdout + done.stderr
    for number, (line, words) in enumerate(WRONG.items(), first):
        assert words in errors[number], (line, errors[number])
