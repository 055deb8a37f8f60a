"""What a stranger cannot do: bring text into generated code, leave the cache's folder, plant a library, run code from a file."""

import ast
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
import torch
from cores import adlif, lif
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nursery import Nursery
from test_faults import USE

import flexsn
from flexsn._capture.signature import make_signature
from flexsn._capture.trace import Meta
from flexsn._codegen.cpp_step import literal
from flexsn._codegen.language import safe, where_of
from flexsn._codegen.triton_values import literal as triton_literal
from flexsn._ir.graph import Builder
from flexsn._ir.identifiers import _RESERVED, identifier
from flexsn._ir.ops import OPS
from flexsn._program import serialize as text
from flexsn._program.captured import draw
from flexsn._program.compiled import Program
from flexsn._runtime import cpp_compiler as launch_compiler
from flexsn._runtime import cpp_kernel as launch_cpp
from flexsn._runtime import disk_cache as launch_cache
from flexsn.errors import OperandTypeError, ProgramTextError

CPU = torch.device("cpu")
PACKAGE = Path(flexsn.__file__).parent

NASTY = [
    "", "*/", "// x\\", "??/", '"', "'", "\n#include </etc/passwd>", "\r", "\u2028x", "); system(\"id\"); (", "../../x", "/etc/passwd", "\0",
    "%s{0}", "{T}", "µ", "ﬁ", "é*/", "class", "int", "N", "T", "tile", "x0_row", "std", "__builtin_trap", "lambda", "import os", "a b",
    '"""', "'''\nimport os\n", "t1", "K", "EOF", "_Pragma", "x" * 5000, "float", "tl", "math", "run", "\N{ZERO WIDTH SPACE}x",
]  # fmt: skip
hostile = st.sampled_from(NASTY) | st.text(max_size=30) | st.text("*/\"'\\?\n#;(){}a_", max_size=12)


# --- names -----------------------------------------------------------------------------------------------------------------
@given(hostile)
def test_a_name_in_code_is_a_plain_identifier(name):
    found = identifier(name)
    assert found is None or (re.fullmatch("[A-Za-z][A-Za-z0-9_]{0,41}", found, re.ASCII) and found not in _RESERVED)


@given(hostile)
def test_what_stands_in_comments_stays_there(name):
    for said in (safe(name), where_of(f"{name}:3: {name}")):
        assert re.fullmatch(r"[\x20-\x7e]*", said) and len(said) <= 110 and "\\" not in said and "??" not in said


@given(st.floats() | st.floats(width=32) | st.integers(), st.sampled_from([d for d in (
    torch.float32, torch.float64, torch.float16, torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64)]))  # fmt: skip
def test_a_constant_is_a_number_in_code(value, dtype):
    if isinstance(value, int) and abs(value) > 2**1000:
        return
    if isinstance(value, float) and value != value and not dtype.is_floating_point and dtype is not torch.bool:
        value = 0
    node = Builder("core").const(value, dtype)
    number = r"\(?-?[0-9.]+(e[+-]?[0-9]+)?f?\)?"
    assert re.fullmatch(
        rf"true|false|{number}|u?int\d+_t\({number}\)|-?std::numeric_limits<(float|double|int64_t)>::(quiet_NaN|infinity|min)\(\)",
        literal(node),
    )
    python = ast.unparse(ast.parse(triton_literal(node)))
    assert set(re.findall("[A-Za-z_]+", re.sub(r"[0-9]e[+-]", "0", python))) <= {
        "tl", "full", "float", "to", "bitcast", "True", "False", "int", "nan", "inf", "uint", "tl.float"
    }  # fmt: skip


class Liar(float):
    """A number that writes itself as code."""

    def __repr__(self):
        return '0); system("touch canary"); ('

    __str__ = __repr__

    def __format__(self, spec):
        return repr(self)


def test_a_number_that_lies_about_itself():
    x = torch.rand(4, 3)
    result = flexsn.scan(lambda x, v: (x * Liar(2.0) + v, v), [x], [None], backend="cpp")
    assert torch.equal(result.outputs[0], x * 2.0)


# --- whole sources: the harmless one with other names ---------------------------------------------------------------------
def written(core, counts):
    metas = [Meta((4,), torch.float32) for _ in range(counts[0])] + [None] * counts[1] + [Meta((), torch.float32) for _ in range(counts[2])]
    drawn = draw(core, make_signature(core, *counts), metas, CPU, {})
    drawn.differentiate(core, {}, CPU)
    return json.loads(text.write(drawn, vjp=True))


TEXTS = {"lif": written(lif, (1, 1, 2)), "adlif": written(adlif, (2, 2, 2))}


def sources(data, backend):
    made = Program(backend, text.read(json.dumps(data), CPU), CPU)
    ins = made.sig.num_inputs
    plans = [made.forward_plan([torch.float32] * ins, True, True)]
    plans.append(made.backward_plan([torch.float32] * ins, tuple(f"gx{k}" for k in range(ins)), ("gy0",)))
    return [made.backend.render(plan) for plan in plans]


def renamed(data, words):
    """The same program with strings of a stranger where the core's and its names stood."""
    data = json.loads(json.dumps(data))
    words = iter(words * 1000)
    data["core"] = next(words)
    new = {name: next(words) for name in data["names"]}
    data["names"] = [new[n] for n in data["names"]]
    for step in (data["forward"], data["vjp"]):
        for node in step["graph"]["nodes"]:
            node[-1] = f"{next(words)}:1: {next(words)} = {next(words)}"
        for *_, meta in step["statics"]["nodes"]:
            if "line" in meta:
                meta["line"] = f"{next(words)}:1: {next(words)} = {next(words)}"
            if meta.get("role") in new:
                meta["role"] = new[meta["role"]]
    return data


def cpp_tokens(source):
    bare = re.sub(r"//[^\n]*", "", source)
    assert "/*" not in bare and re.fullmatch(r"[\x20-\x7e\n]*", source)
    return re.findall(r'[A-Za-z_]\w*|"[^"\n]*"|[0-9][\w.+-]*|\S', bare)


def python_tokens(source):
    assert re.fullmatch(r"[\x20-\x7e\n]*", source)
    skipped = (tokenize.COMMENT, tokenize.NL)
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in skipped]
    return ["doc" if t.string.startswith('"""') else t.string for t in tokens]


def assert_same_up_to_names(tokens, harmless):
    """One renaming of identifiers leads from the one to the other. Inlining depends on names: statements may be split."""
    forbidden = {"system", "include", "asm", "exec", "eval", "import", "open", "__import__", "define", "pragma"}
    extra = set(tokens) - set(harmless)
    assert all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", word) for word in extra), extra
    assert not extra & forbidden
    for word in forbidden & set(harmless):
        assert tokens.count(word) == harmless.count(word)
    calls = lambda words: {a for a, b in itertools.pairwise(words) if b == "(" and a.isidentifier()}
    assert {c for c in calls(tokens) - calls(harmless) if not c.endswith(("_forward", "_backward"))} == set()


@pytest.mark.parametrize("name", [n if n == "lif" else pytest.param(n, marks=pytest.mark.slow) for n in TEXTS])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(words=st.lists(hostile, min_size=1, max_size=12))
def test_no_text_of_a_stranger_reaches_generated_code(name, words):
    data = renamed(TEXTS[name], words)
    for backend, tokens in (("cpp", cpp_tokens), ("triton", python_tokens)):
        for source, harmless in zip(sources(data, backend), sources(TEXTS[name], backend), strict=True):
            if backend == "triton":
                ast.parse(source)
            assert_same_up_to_names(tokens(source), tokens(harmless))


@pytest.mark.parametrize("name", ["", "a b", "1a", "_a", "a;b", "a\n", 'a"', "a(", "a.b", "ä", "a" * 90, None, 3])
def test_a_value_of_a_program_has_a_plain_name(name):
    """The names of a graph's values stand in generated code."""
    for part, place in (("inputs", 1), ("nodes", 0)):
        data = json.loads(json.dumps(TEXTS["lif"]))
        data["forward"]["graph"][part][0][place] = name
        with pytest.raises(ProgramTextError):
            text.read(json.dumps(data), CPU)


@pytest.mark.parametrize("value", ["1.0", "1.0); system(", [1.0], None, {"node": "x"}])
def test_a_constant_of_a_program_is_a_number(value):
    data = json.loads(json.dumps(TEXTS["lif"]))
    (constant,) = [a for node in data["forward"]["graph"]["nodes"] if node[0] == "t5" for a in node[2] if isinstance(a, list)]
    constant[0] = value
    with pytest.raises(ProgramTextError):
        text.read(json.dumps(data), CPU)


def test_what_the_check_above_catches():
    good = cpp_tokens(sources(TEXTS["lif"], "cpp")[0])
    for bad in (["system", "(", '"id"', ")"], ["#", "include"], ["asm"], ["h", "(", ")"]):
        with pytest.raises(AssertionError):
            assert_same_up_to_names(good + bad, good)


def test_odd_names_build_and_run(tmp_path):
    """Words that mean something in C++, in generated code or in its headers; a file and a core with odd names."""
    names = [
        "int_", "double", "template", "errno", "N", "K", "T", "tile", "i", "n", "x0_row", "std", "EOF", "INFINITY", "I", "step", "run",
        "padded", "select", "load", "size", "full", "y0", "j1", "gamma", "exp", "spread", "flexsn", "unix", "NAN", "M_PI", "threads", "µ",
    ]  # fmt: skip
    lines = [f"    {name} = x * {k}.25 + v" for k, name in enumerate(names)]
    source = "\n".join(["def odd(x, v):", *lines, f"    return {' + '.join(names)}, v"])
    space = {}
    exec(compile(source, str(tmp_path / 'a"*/\n#include "nothing".py'), "exec"), space)
    core = space["odd"]
    core.__name__ = core.__qualname__ = 'odd*/"; system("id"); //\\\n#error'
    x = torch.rand(3, 5)
    for backend in ("cpp", "triton"):
        found = flexsn.scan(core, [x], [None], backend=backend).outputs[0]
        assert torch.equal(found, flexsn.scan(core, [x], [None], backend="torch").outputs[0])


def test_variables_named_as_functions_of_the_kernel():
    functions = [name for name, op in OPS.items() if op.arity == 1 and op.promote == "float" and hasattr(torch, name)]
    assert {"exp", "sqrt", "sin"} <= set(functions)
    lines = [f"    {name} = torch.{name}(x * 0.5 + 0.25)\n    {name} = torch.{name}({name} * 0.125) + v" for name in functions]
    space = {"torch": torch}
    exec("\n".join(["def core(x, v):", *lines, f"    return {' + '.join(functions)}, v"]), space)
    x = torch.rand(3, 5, dtype=torch.float64)
    want = flexsn.scan(space["core"], [x], [None], backend="torch").outputs[0]
    torch.testing.assert_close(flexsn.scan(space["core"], [x], [None], backend="cpp").outputs[0], want, equal_nan=True)


# --- the folder ---------------------------------------------------------------------------------------------------------------
@pytest.fixture
def nest(tmp_path):
    """Folders of this user in each other."""
    folder = tmp_path / "home" / "cache" / "flexsn"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize(("up", "mode", "refused"), [
    (0, 0o755, False), (0, 0o777, True), (0, 0o1777, True), (0, 0o702, True), (1, 0o777, True), (1, 0o1777, False), (2, 0o702, True),
    (2, 0o755, False),
])  # fmt: skip
def test_folders_that_others_can_write(nest, up, mode, refused):
    place = (nest, *nest.parents)[up]
    place.chmod(mode)
    assert launch_cache.writable_by_others(nest) == (place if refused else None)


def test_folders_of_a_group(nest, monkeypatch):
    nest.parent.chmod(0o775)
    monkeypatch.setattr(launch_cache, "_is_own_group", lambda group: False)
    assert launch_cache.writable_by_others(nest) == nest.parent
    monkeypatch.setattr(launch_cache, "_is_own_group", lambda group: True)
    assert launch_cache.writable_by_others(nest) is None


@pytest.mark.skipif(os.getuid() != 0, reason="root alone gives folders away")
@pytest.mark.parametrize("up", [0, 1, 2])
def test_folders_of_another_user(nest, up):
    place = (nest, *nest.parents)[up]
    os.chown(place, 12345, -1)
    assert launch_cache.writable_by_others(nest) == place


def test_a_link_to_a_folder_of_ones_own_is_followed_and_one_below_it_is_not(tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "scratch")
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path / "linked"))
    assert launch_cache.folder() == tmp_path.resolve() / "scratch" / "cpp"
    (tmp_path / "scratch" / "cpp").rmdir()
    (tmp_path / "scratch" / "cpp").symlink_to(tmp_path)
    monkeypatch.setattr(launch_cache, "_private", None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="only this user can write"):
        assert launch_cache.folder().name.startswith("flexsn-")


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    made = Nursery(tmp_path_factory.mktemp("nursery"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def library(nursery, tmp_path_factory):
    """An entry for `USE`, and a library that leaves a trace when it is loaded."""
    folder = tmp_path_factory.mktemp("planted")
    assert nursery.run(USE, folder / "cache")[0] == 0
    (entry,) = (folder / "cache" / "cpp").glob("*.so")
    canary = folder / "canary"
    (folder / "evil.c").write_text(
        f'#include <stdio.h>\n__attribute__((constructor)) void go(void) {{ fclose(fopen("{canary}", "w")); }}\nint run(void) {{ return 0; }}\n'
    )
    subprocess.run(["gcc", "-shared", "-fPIC", str(folder / "evil.c"), "-o", str(folder / "evil.so")], check=True)
    return entry, folder / "evil.so", canary


def plant(library, cache):
    entry, evil, _ = library
    (cache / "cpp").mkdir(parents=True)
    cache.chmod(0o700)
    (cache / "cpp").chmod(0o700)
    planted = cache / "cpp" / entry.name
    planted.write_bytes(evil.read_bytes())
    planted.chmod(0o700)
    import hashlib

    planted.with_suffix(".sha256").write_text(hashlib.sha256(evil.read_bytes()).hexdigest())
    return planted


PLANTED = {
    "an entry that a group can write": lambda planted: planted.chmod(0o770),
    "an entry that everybody can write": lambda planted: planted.chmod(0o702),
    "an entry of another user": lambda planted: os.chown(planted, 12345, -1),
    "a link": lambda planted: planted.symlink_to(planted.rename(planted.with_name("elsewhere.so"))),
    "a folder that everybody can write": lambda planted: planted.parent.chmod(0o777),
    "a folder of another user": lambda planted: os.chown(planted.parent, 12345, -1),
    "a cache that everybody can write": lambda planted: planted.parent.parent.chmod(0o777),
    "a cache of another user": lambda planted: os.chown(planted.parent.parent, 12345, -1),
    "another digest": lambda planted: planted.with_suffix(".sha256").write_text("0" * 64),
}


@pytest.mark.parametrize("how", PLANTED)
def test_a_planted_library_is_not_loaded(nursery, library, tmp_path, how):
    if "another user" in how and os.getuid() != 0:
        pytest.skip("root alone gives files away")
    planted = plant(library, tmp_path / "cache")
    PLANTED[how](planted)
    code, said = nursery.run(USE, tmp_path / "cache")
    assert code == 0 and said.endswith("built 1\n"), said
    assert not library[2].exists()


def test_the_planted_library_would_have_shown(nursery, library, tmp_path):
    plant(library, tmp_path / "cache")
    code, said = nursery.run(USE, tmp_path / "cache")
    assert code != 0 and library[2].exists(), said  # this user's own file, private and whole: it is loaded
    library[2].unlink()


# --- the compiler ---------------------------------------------------------------------------------------------------------------
ODD_PATHS = ["a;touch pwned", "$(touch pwned)", "`touch pwned`", "a b'\"c", "-o pwned", "@pwned", "a\nb", "*?[a]", "a,b:c", "é%s$HOME"]


def test_odd_paths_reach_the_compiler_as_they_are(nursery, tmp_path):
    """One folder in another with all of them; a relative one that looks like an option."""
    cache = tmp_path.joinpath(*ODD_PATHS)
    (tmp_path / "work").mkdir()
    code = f"import os\nos.chdir({str(tmp_path / 'work')!r})\n" + USE
    assert nursery.run(code, cache) == (0, "built 1\n")
    assert len(list((cache / "cpp").glob("*.so"))) == 1
    assert nursery.run(code, "-rf @x;y") == (0, "built 1\n")
    assert [p.name for p in (tmp_path / "work").iterdir()] == ["-rf @x;y"]
    assert not list(tmp_path.rglob("pwned"))


def test_the_compiler_is_run_by_its_path_with_a_list(monkeypatch, tmp_path):
    seen = []

    class Watched(subprocess.Popen):
        def __init__(self, arguments, **options):
            seen.append((arguments, options))
            super().__init__(arguments, **options)

    monkeypatch.setattr(launch_compiler.subprocess, "Popen", Watched)
    launch_cpp._build('extern "C" int run() { return 0; }\n', tmp_path / "entry.so")
    assert len(seen) == 3  # the compiler, then the linker for the stub of PyTorch's library and for the kernel
    for arguments, options in seen:
        assert isinstance(arguments, list) and os.path.isabs(arguments[0]) and not options.get("shell")
        assert options["stdin"] == subprocess.DEVNULL


def calls_in(tree):
    return [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_no_module_has_a_shell_a_network_or_a_pickle(path):
    tree = ast.parse(path.read_text())
    imported = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and not n.level}
    assert not imported & {
        "socket",
        "http",
        "urllib",
        "urllib3",
        "requests",
        "ssl",
        "ftplib",
        "smtplib",
        "asyncio",
        "pickle",
        "marshal",
        "shelve",
    }
    assert path.stem in ("cpp_compiler", "doctor", "vectors") or not imported & {"subprocess", "pty", "multiprocessing"}
    for call in calls_in(tree):
        assert "shell=True" not in call and not re.match(r"(os\.(system|popen|exec|spawn)|eval|torch\.load)\b", call), call
        assert path.parts[-2:] == ("triton", "kernel.py") or not re.match(r"exec\(|compile\(", call), call


# --- no network, no telemetry ----------------------------------------------------------------------------------------------------
OFFLINE = (
    """
import sys

def watch(event, arguments):
    if event.split(".")[0] in ("socket", "urllib", "http", "ftplib", "smtplib"):
        raise RuntimeError(f"network: {event} {arguments}")

sys.addaudithook(watch)
"""
    + USE
    + """
neuron = flexsn.FlexSN(core, num_inputs=1, num_states=1)
x.requires_grad_()
neuron(x).sum().backward()
import socket
try:
    socket.socket()
except RuntimeError:
    print("watched")
"""
)


def test_no_network(nursery, tmp_path):
    assert nursery.run(OFFLINE, tmp_path) == (0, "built 1\nwatched\n")


FILES = (
    """
import os, sys
opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" and arguments[1] not in (None, "r", "rb") else None)
"""
    + USE
    + """
allowed = (os.environ["FLEXSN_CACHE_DIR"], "/dev/null")
print(sorted({o for o in opened if not o.startswith(allowed) and not o.isdigit()}))
"""
)


def test_nothing_is_written_outside_of_the_cache(nursery, tmp_path):
    assert nursery.run(FILES, tmp_path) == (0, "built 1\n[]\n")


# --- what comes from files --------------------------------------------------------------------------------------------------------
UNPICKLE = """
import pickle, sys, torch
sys.path.insert(0, {tests!r})
import security_core
from flexsn._program import serialize as text

events = []
watched = ("core", "exec", "compile", "subprocess.Popen", "os.system", "ctypes.dlopen", "import", "os.fork", "socket")
on = [False]
sys.addaudithook(lambda event, arguments: events.append((event, str(arguments)[:200])) if on[0] and event.startswith(watched) else None)
torch.ops.aten.add.Tensor
pickle.loads(pickle.dumps(torch.nn.Linear(1, 1)))  # imports of PyTorch's own
data = open({path!r}, "rb").read()
on[0] = True
{act}
on[0] = False
print(events)
"""

CORE = """
import sys
import torch

class Core(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.rand(3))

    def forward(self, x, v):
        sys.audit("core.forward")
        v = v * self.w + x
        return v * v, v
"""


@pytest.fixture
def importable(tmp_path, monkeypatch):
    (tmp_path / "security_core.py").write_text(CORE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import security_core

    yield security_core
    del sys.modules["security_core"]


def test_unpickling_a_module_runs_nothing_of_it(nursery, importable, tmp_path):
    import pickle

    neuron = flexsn.FlexSN(importable.Core(), num_inputs=1, num_states=1, backend="cpp")
    neuron(torch.ones(4, 3)).sum().backward()
    neuron.detach_states()
    (tmp_path / "neuron.pkl").write_bytes(pickle.dumps(neuron))
    code = UNPICKLE.format(tests=str(tmp_path), path=str(tmp_path / "neuron.pkl"), act="pickle.loads(data)")
    assert nursery.run(code, tmp_path / "cache") == (0, "[]\n")


@pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning")
def test_a_pickle_names_nothing_but_modules_tensors_and_the_core(importable):
    import pickle
    import pickletools

    neuron = flexsn.FlexSN(importable.Core(), num_inputs=1, num_states=1, backend="cpp")
    neuron(torch.ones(4, 3))
    neuron.reset()
    strings = [arg for op, arg, _ in pickletools.genops(pickle.dumps(neuron, protocol=2)) if op.name == "GLOBAL"]
    assert {s.split(" ")[0].split(".")[0] for s in strings} <= {
        "flexsn",
        "torch",
        "security_core",
        "collections",
        "builtins",
        "__builtin__",
        "_codecs",
        "copy_reg",
    }
    assert {s for s in strings if s.startswith("flexsn")} == {"flexsn.module FlexSN"}


def test_reading_a_program_runs_nothing(nursery, importable, tmp_path):
    (tmp_path / "program.json").write_text(json.dumps(TEXTS["adlif"]))
    act = "text.read(data.decode(), torch.device('cpu'))"
    warm = "from flexsn._program.cache import program_from\n"  # what reading imports is PyTorch's
    code = UNPICKLE.format(tests=str(tmp_path), path=str(tmp_path / "program.json"), act=act).replace(
        "on[0] = True", f"{warm}{act}\non[0] = True"
    )
    assert nursery.run(code, tmp_path / "cache") == (0, "[]\n")


@pytest.mark.parametrize("op", [
    "aten.from_file.default", "aten.add_.Tensor", "aten.add.out", "aten.copy_.default", "debugprims.load_tensor.default",
    "_c10d_functional.all_reduce.default", "flexsn.forward.default", "load_library.a.b", "__class__.__init__.__globals__",
    "aten.__class__.__mro__", "..", "aten.add.Tensor.x", "profiler._record_function_enter_new.default",
])  # fmt: skip
def test_operators_that_do_more_than_compute_are_refused(op):
    assert "aten.sum.default" in json.dumps(TEXTS["lif"])
    with pytest.raises(ProgramTextError):
        text.read(json.dumps(TEXTS["lif"]).replace("aten.sum.default", op), CPU)


@pytest.mark.parametrize("word", ["load", "hub", "_dynamo", "__builtins__", "Tensor", "nn.Module", ["float32"], None])
def test_names_that_are_no_dtypes_are_refused(word):
    with pytest.raises(ProgramTextError):
        text.read(json.dumps(TEXTS["lif"] | {"outputs": [[[4], word]]}), CPU)


# --- kernels take pointers: what a graph passes is looked at first -----------------------------------------------------------------
def program():
    return json.dumps(TEXTS["lif"])


def forward(x=(5, 4), v=(4,), params=2, dtype=torch.float32):
    v = None if v is None else torch.zeros(v, dtype=dtype)
    return torch.ops.flexsn.forward(program(), [torch.zeros(x)], [v], [torch.ones(()).to(dtype)] * params, [4], 3, True, False)


def backward(checkpoint=(1, 4), grad=(40, 4), T=40, dtype=torch.float32):
    made = json.loads(program())
    return torch.ops.flexsn.backward(
        json.dumps(made), [torch.zeros(T, 4)], [None], [torch.ones(())] * 2, [torch.zeros(checkpoint, dtype=dtype)],
        [torch.zeros(grad)], ["gy0"], ["gx0"], [4],
    )  # fmt: skip


def test_operands_of_the_operators_are_checked():
    assert [y.shape for y in forward()] == [y.shape for y in forward(v=None)] == [(4,), (3, 4), (5, 4)]
    rows = Program("cpp", text.read(program(), CPU), CPU).checkpoints(40)
    assert rows > 0 and backward((rows, 4))[0].shape == (40, 4)
    for wrong in (
        lambda: forward(params=1), lambda: forward(dtype=torch.float16), lambda: backward((rows - 1, 4)), lambda: backward((0, 4)),
        lambda: backward((rows, 3)), lambda: backward((rows, 4), grad=(39, 4)), lambda: backward((rows, 4), dtype=torch.float16),
    ):  # fmt: skip
        with pytest.raises(OperandTypeError, match="of a kernel"):
            wrong()
    for wrong in (lambda: forward(x=(5, 3)), lambda: forward(v=(3,))):
        with pytest.raises(RuntimeError, match=r"expand"):
            wrong()
