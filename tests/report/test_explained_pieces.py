"""A core that mixes neurons in a report: its pieces as sentences, and as a drawing whose arrows lead from box to box."""

import itertools
import json
import re
import xml.etree.ElementTree as ET

import pytest
import torch
from helpers import line_of, on_cpu
from torch import nn

import flexsn

W_IN, W, DOWN, BACK = (torch.eye(*shape, device="cpu") for shape in ((4, 6), (6, 6), (6, 3), (3, 6)))
REST, OUT = torch.zeros(2, 6), torch.zeros(2, 3)


def recurrent(x, v, s):
    h = v + (x @ W_IN + s @ W - v) / 2.0
    s = flexsn.surrogate.atan(h - 1.0)
    return s, h * (1.0 - s), s


def two_layers(x, v, u):
    v = 0.9 * v + x @ W_IN
    s = flexsn.surrogate.atan(v - 1.0)
    u = 0.8 * u + s @ DOWN
    return torch.sigmoid(u), v * (1.0 - s), u


def feedback(x, v, u, past):
    v = 0.9 * v + x @ W_IN + past @ BACK
    s = flexsn.surrogate.atan(v - 1.0)
    u = 0.8 * u + s @ DOWN
    return torch.tanh(u), s.sum(-1), v, u, torch.tanh(u)


def later(x, a, b):
    """The call is computed from `a`, and comes back to it by way of `b`, two steps later."""
    return x @ W_IN + b, b, torch.tanh((a * 2.0) @ W)


def two_loops(x, v, u):
    v = torch.tanh(v @ W + x @ W_IN)
    u = torch.tanh((u * 0.5) @ W + (v @ W).T.T)
    return u + v, v, u


CASES = {
    "recurrent": (recurrent, [REST, REST]),
    "two layers": (two_layers, [REST, OUT]),
    "feedback": (feedback, [REST, OUT, OUT]),
    "later": (later, [REST, REST]),
    "two loops": (two_loops, [REST, REST]),
}


def explained(name):
    core, states = CASES[name]
    return flexsn.explain(core, torch.rand(5, 2, 4), states=[v.to(torch.get_default_device()) for v in states], measure=False)


def told(made):
    """The lines of the section, without the user's."""
    section = re.search(r"--- pieces \(in the order in which they run\) ---\n(.*?)\n\n---", str(made), flags=re.DOTALL)[1]
    return [line.strip() for line in section.splitlines() if not re.match(r" +\w+\.py:\d+: ", line)]


def test_a_recurrence_is_told():
    made = explained("recurrent")
    assert told(made) == [
        "1. `matmul` of `x` runs once, on the whole sequence, and gives `mixed_0`.",
        "It lies in no recurrence: nothing that it takes is computed from it.",
        "2. A loop over time in C++ advances `v` and `s`. At every step it runs:",
        "2.1. `matmul` of `s` of the step before gives `mixed_1`.",
        "It lies in a recurrence: it is computed from `s` of the step before, and `s` from it.",
        "2.2. A kernel of one step takes `mixed_0` and `mixed_1`, advances `v` and `s`, and gives the output. It is the one that is shown below.",
        "The next step starts from `v` and `s`.",
    ]
    lines = [line_of(recurrent, text) for text in ("h = v +", "s = flexsn", "return s")]
    call, loop = made.pieces
    assert [p.lines for p in (call, *loop.parts)] == [(lines[0],), (lines[0],), tuple(lines)]
    assert loop.parts[1].takes == (("`mixed_0`", "1"), ("`mixed_1`", "2.1")) and loop.parts[0].takes == (("`s` of the step before", "2.2"),)


def test_layers_in_no_recurrence_are_told():
    assert told(explained("two layers"))[2:6] == [
        "2. A kernel over the whole sequence takes `mixed_0`, advances `v`, and gives `s`.",
        "No call that mixes neurons lies in the loop of `v` from step to step.",
        "3. `matmul` of `s` runs once, on the whole sequence, and gives `mixed_1`.",
        "It lies in no recurrence: nothing that it takes is computed from it.",
    ]


def test_a_recurrence_over_several_steps_is_told():
    lines = told(explained("later"))
    why = "It lies in a recurrence: it is computed from `a` of the step before, and `a` from it at a later step."
    assert "1. `matmul` of what is computed for it gives" not in lines and why in lines


def test_attributes_that_mix_have_a_name():
    assert any("`T` of `mixed_" in line for line in told(explained("two loops")))


def test_names_of_values_are_those_of_lines_of_their_own():
    """`h` is what its line gives, and not what is computed for a call on that line."""

    def core(x, v):
        h = torch.tanh((x + v * 2.0) @ W)
        return (h * 3.0) @ W, h

    made = flexsn.explain(core, torch.rand(5, 2, 6), states=(REST,), measure=False)
    assert any("gives what `matmul` takes" in line for line in told(made)) and not any("of `h`" in line for line in told(made))


def test_a_core_that_does_not_mix_has_no_pieces():
    made = flexsn.explain(lambda x, v: (x + v, v), torch.rand(5, 3), measure=False)
    assert made.pieces == [] and made.pieces_svg() is None and "--- pieces" not in str(made) and ">Pieces<" not in made.html()


def test_why_a_loop_is_no_cpp_is_told():
    def core(x, v):
        v = torch.tanh(x + (v @ W).cumsum(-1))
        return v, v

    made = flexsn.explain(core, torch.rand(5, 2, 6), measure=False)
    assert made.pieces[0].text.startswith("A loop over time in Python (not in C++: `cumsum` has no op there) advances `v`.")


@pytest.mark.parametrize("over_time", [False, True])
def test_recurrent_layers_of_a_network(over_time):
    network = nn.Sequential(nn.Linear(4, 6), flexsn.Recurrent(flexsn.ALIF(tau=20.0), nn.Linear(6, 6, bias=False)))
    made = flexsn.explain(flexsn.over_time(network) if over_time else network, torch.rand(5, 2, 4), measure=False)
    assert list(made.layers) == ["network.1" if over_time else "1"]
    (layer,) = made.layers.values()
    assert layer.pieces[0].text == "A loop over time in C++ advances `v`, `a` and `y`. At every step it runs:"
    assert network[1].states is None


CUT = "in one Triton kernel (a program has all 5 neurons of 16 sequences, and keeps their weights)"


@on_cpu
def test_how_the_loop_runs_is_that_of_the_backend():
    """Also of a core that others ran last, in calls that were noted."""

    def core(x, v, w):
        v = torch.tanh(x + v @ w)
        return v, v

    given = torch.randn(1, 3, 5), [torch.zeros(3, 5)], [torch.randn(5, 5)]
    with torch.no_grad():
        for backend in ("triton", "cpp") * 3:
            flexsn.scan(core, [given[0]], *given[1:], backend=backend)
    for backend, how in (("triton", CUT), ("cpp", "in C++"), ("triton", CUT)):
        made = flexsn.explain(core, given[0], states=given[1], params=given[2], backend=backend, measure=False)
        assert made.pieces[0].text.startswith(f"A loop over time {how} advances")


@pytest.mark.parametrize("name", CASES)
def test_page_and_data(name):
    made = explained(name)
    page = made.html()
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) and ">Pieces</h2>" in page and ET.fromstring(page) is not None
    assert len(json.loads(json.dumps(made.to_dict()))["pieces"]) == len(made.pieces)


# --- the drawing ---------------------------------------------------------------------------------------------------------------------
def boxes_of(root):
    found = []
    for g in root.findall("g"):
        x, y, width, height = (float(g.find("rect").get(key)) for key in ("x", "y", "width", "height"))
        found.append((g.get("class"), (x, y, x + width, y + height), g.findall("text")))
    return found


def ends(path):
    """The first and the last point of an arrow: its segments are `M H q V q H`, or `M V`."""
    text = path.get("d")
    x, y = map(float, re.match(r"M([-\d.]+),([-\d.]+)", text).groups())
    if down := re.fullmatch(r"M\S+ V([-\d.]+)", text):
        return (x, y), (x, float(down[1]))
    turn, to = re.search(r" V([-\d.]+) q0,([-\d.]+)", text), re.search(r"H([-\d.]+)$", text)
    return (x, y), (float(to[1]), float(turn[1]) + float(turn[2]))


def at_edge(point, box):
    (x, y), (left, top, right, bottom) = point, box
    beside = min(abs(x - left), abs(x - right)) < 0.2 and top < y < bottom
    return beside or (min(abs(y - top), abs(y - bottom)) < 0.2 and left < x < right)


@pytest.mark.parametrize("name", CASES)
def test_drawing(name):
    made = explained(name)
    root = ET.fromstring(made.pieces_svg())
    boxes, width, height = boxes_of(root), float(root.get("width")), float(root.get("height"))
    parts = [p for piece in made.pieces for p in (piece.parts or [piece])]
    shown = [(kind, box) for kind, box, _ in boxes if kind != "loop-head"]
    outputs = sum(len(p.outputs) for p in parts)
    inputs = {taken for p in parts for taken, giver in p.takes if not giver}
    assert len(shown) == len(parts) + outputs + len(inputs) and outputs == (2 if name == "feedback" else 1)
    for _, (left, top, right, bottom), texts in boxes:
        assert left >= 0 and top >= 0 and right <= width and bottom <= height
        for text in texts:
            assert (
                left < float(text.get("x")) and float(text.get("x")) + 7.3 * len(text.text) < right and top < float(text.get("y")) < bottom
            )
    for (_, (_, _, _, bottom)), (_, (_, top, _, _)) in itertools.pairwise(shown):
        assert bottom < top, "boxes stand one below the other"
    arrows = [p for p in root.findall("path") if p.get("marker-end")]
    assert len(arrows) == sum(len({giver or taken for taken, giver in p.takes}) for p in parts) + outputs
    for start, end in map(ends, arrows):
        assert any(at_edge(start, box) for _, box in shown) and any(at_edge(end, box) for _, box in shown)
    assert all(0 <= float(x) <= width for p in arrows for x in re.findall(r"H([-\d.]+)", p.get("d")))
    loops = [p for p in arrows if p.get("class") == "loop"]
    assert bool(loops) == any(piece.parts for piece in made.pieces) and all(p.get("stroke-dasharray") for p in loops)


def test_a_frame_is_around_what_a_loop_runs():
    boxes = boxes_of(ET.fromstring(explained("two loops").pieces_svg()))
    frames = {texts[0].text.partition(".")[0]: box for kind, box, texts in boxes if kind == "loop-head"}
    numbers = [(texts[0].text.partition(". ")[0], box) for kind, box, texts in boxes if kind in ("call", "kernel")]
    assert len(frames) == 2 and any("." in number for number, _ in numbers)
    for number, (left, top, right, bottom) in numbers:
        for loop, frame in frames.items():
            inside = frame[0] < left and frame[1] < top and right < frame[2] and bottom < frame[3]
            assert inside == number.startswith(f"{loop}.")
            assert inside or bottom < frame[1] or frame[3] < top


def test_the_whole_call_is_measured():
    core, states = CASES["recurrent"]
    made = flexsn.explain(core, torch.rand(5, 2, 4), states=states)
    assert 0 < made.whole["inference"] < made.whole["training"]
    assert str(made).startswith("=== recurrent: fused by cpp, in pieces ===")
    assert "the whole call takes" in str(made) and "the whole call takes" in made.html() and made.to_dict()["whole"] == made.whole
    assert flexsn.explain(core, torch.rand(5, 2, 4)).whole  # default states of another width
    assert explained("recurrent").whole == {} and "not measured" in str(explained("recurrent"))
    assert flexsn.explain(lambda x, v: (x, 0.5 * v + x), torch.rand(5, 2, 4)).whole == {}
