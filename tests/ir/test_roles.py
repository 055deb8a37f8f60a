"""Roles: kinds and numbers that print as `v0`, and that nothing takes apart."""

import ast
import copy
import pickle
import re
from pathlib import Path

import pytest

import flexsn
from flexsn._ir.roles import Kind, Role, of_kind, roles


@pytest.mark.parametrize("kind", Kind, ids=lambda k: k.name)
def test_a_role_prints_and_is_read_back(kind):
    role = Role(kind, 12)
    assert (role, str(role), f"{role}_seq") == (f"{kind.value}12", f"{kind.value}12", f"{kind.value}12_seq")
    for again in (Role.of(str(role)), copy.deepcopy(role), pickle.loads(pickle.dumps(role))):
        assert (again, again.kind, again.number) == (role, kind, 12)


def test_gradients_and_what_they_belong_to():
    assert [r.grad for r in (Role(Kind.INPUT, 1), Role(Kind.STATE, 0), Role(Kind.STATES, 3))] == ["gx1", "gv0", "gs3"]
    assert Role.of("gp2").primal == Role(Kind.PARAM, 2) and Role.of("v4").to(Kind.CHECKPOINT) == "c4"
    assert all(k.is_grad == k.name.endswith("_GRAD") for k in Kind)
    assert of_kind([*roles(Kind.INPUT, 2), *roles(Kind.STATE, 2)], Kind.STATE) == ["v0", "v1"]


@pytest.mark.parametrize("text", ["", "x", "x01", "x-1", "_0", "q0", "gc0", "x0 ", "X0"])
def test_other_texts_are_no_roles(text):
    with pytest.raises(ValueError, match=re.escape(f"{text!r} is no role")):
        Role.of(text)


def test_nothing_takes_a_role_apart():
    """No engine module compares the first letters of a name, or makes a role of letters and a number."""
    package = Path(flexsn.__file__).parent
    letters, found = {k.value for k in Kind}, []
    for name in ("_ir", "_plan", "_codegen", "_runtime", "_program", "_operator", "_torch_compile", "_report"):
        for path in {*(package / name).glob("*.py")} - {package / "_ir" / "roles.py"}:
            for node in ast.walk(ast.parse(path.read_text())):
                cut = isinstance(node, ast.Compare) and isinstance(node.left, ast.Subscript) and node.comparators
                compared = cut and any(isinstance(c, ast.Constant) and c.value in letters | {"g"} for c in node.comparators)
                parts = node.values if isinstance(node, ast.JoinedStr) else []
                made = len(parts) == 2 and isinstance(parts[0], ast.Constant) and parts[0].value in letters
                if compared or made:
                    found.append(f"{path.name}:{node.lineno}")
    assert not found
