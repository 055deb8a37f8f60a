"""What `flexsn.plot` drew is what it was given: positions of spikes, lines, bars, contours and frames."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flexsn
from flexsn import plot, surrogate
from flexsn.errors import ArgumentError, FlexSNError, PictureError, ReturnCountError

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.colors import to_rgba  # noqa: E402
from matplotlib.contour import QuadContourSet  # noqa: E402
from matplotlib.quiver import Quiver  # noqa: E402


@pytest.fixture(autouse=True)
def ax():
    """Axes of a figure that is closed afterwards, as are all others."""
    yield plt.subplots()[1]
    plt.close("all")


def some_spikes(*shape, rate=0.3):
    return (torch.rand(*shape) < rate).float()


def drawn(ax):
    """The picture rendered: what only drawing finds out."""
    ax.figure.canvas.draw()
    return ax


def resonator(x, v, u):
    v, u = v + 0.1 * (x - u - 0.3 * v), u + 0.1 * v
    s = surrogate.atan(v - 1.0)
    return s, v * (1.0 - s), u


# --- Axes in and out ----------------------------------------------------------------------------------------------------------
DRAW = {
    "raster": lambda **kw: plot.raster(some_spikes(20, 5), **kw),
    "traces": lambda **kw: plot.traces(torch.rand(20, 3), some_spikes(20, 3), **kw),
    "rate_histogram": lambda **kw: plot.rate_histogram(some_spikes(20, 5), **kw),
    "heat_map": lambda **kw: plot.heat_map(some_spikes(20, 5), **kw),
    "surrogate_curves": lambda **kw: plot.surrogate_curves(surrogate.atan, **kw),
    "phase_plane": lambda **kw: plot.phase_plane(resonator, points=41, **kw),
}


@pytest.mark.parametrize("name", DRAW)
def test_axes_are_taken_and_returned(name, ax):
    figures = set(plt.get_fignums())
    assert DRAW[name](ax=ax) is ax
    assert ax.has_data() and set(plt.get_fignums()) == figures, "no other figure"
    new = DRAW[name]()
    assert new is not ax and new.figure is not ax.figure and new.has_data()
    drawn(new)


def test_all_functions_are_covered():
    assert set(plot.__all__) == {*DRAW, "animate", "STYLE"}
    with plt.rc_context(plot.STYLE):
        assert not plt.subplots()[1].spines["top"].get_visible()


# --- raster -------------------------------------------------------------------------------------------------------------------
def segments(ax, k=0):
    return np.array(ax.collections[k].get_segments())


@pytest.mark.parametrize("dt", [None, 0.5])
def test_raster_has_a_bar_per_spike(ax, dt):
    spikes = some_spikes(30, 7)
    plot.raster(spikes, ax=ax, dt=dt, height=0.6)
    bars = segments(ax)
    t, n = spikes.nonzero(as_tuple=True)
    assert len(bars) == len(t) > 20
    np.testing.assert_allclose(bars[:, :, 0], np.stack([t, t], 1) * (dt or 1.0))
    np.testing.assert_allclose(bars[:, 0, 1], n - 0.3)
    np.testing.assert_allclose(bars[:, 1, 1], n + 0.3)
    assert ax.get_xlabel() == ("time step" if dt is None else "time (ms)")
    low, high = ax.get_xlim()
    assert low < 0 and high >= 29 * (dt or 1.0)


def test_bars_of_less_than_a_pixel_leave_ink():
    fig, ax = plt.subplots(layout="constrained")
    for n in range(0, 1000, 97):
        spikes = torch.zeros(300, 1000)
        spikes[150, n] = 1.0
        ax.clear()
        plot.raster(spikes, ax=ax)
        ax.set_axis_off()
        fig.canvas.draw()
        assert np.asarray(fig.canvas.buffer_rgba())[..., :3].min() < 250, n
    plt.close(fig)


def test_raster_takes_a_color_per_neuron_and_one_neuron(ax):
    spikes = torch.eye(3).flip(0)  # neuron 2 first
    plot.raster(spikes, ax=ax, color=["red", "green", "blue"])
    assert [tuple(c) for c in ax.collections[0].get_colors()] == [to_rgba(c) for c in ("blue", "green", "red")]
    plot.raster(torch.tensor([0, 1, 1]), ax=ax)
    assert len(segments(ax, 1)) == 2


def test_raster_refuses_batches(ax):
    with pytest.raises(PictureError, match=r"\[5, 2, 3\][\s\S]*spikes\[:, 0\]"):
        plot.raster(torch.zeros(5, 2, 3), ax=ax)


# --- traces -------------------------------------------------------------------------------------------------------------------
def test_traces_draw_membranes_levels_and_spikes(ax):
    v, spikes, threshold = torch.rand(12, 3, requires_grad=True), some_spikes(12, 3), 1.0 + torch.rand(12, 3)
    plot.traces(v, spikes, ax=ax, threshold=threshold, reset=-0.5, dt=2.0, labels=["a", "b", "c"])
    by_style = {style: [line for line in ax.lines if line.get_linestyle() == style] for style in ("-", "--", ":")}
    assert {style: len(lines) for style, lines in by_style.items()} == {"-": 3, "--": 3, ":": 3}
    bases = []
    for k in range(3):
        membrane, level, reset = (by_style[s][k].get_ydata() for s in ("-", "--", ":"))
        bases.append(reset[0] + 0.5)
        np.testing.assert_allclose(membrane - bases[k], v.detach()[:, k], atol=1e-6)
        np.testing.assert_allclose(level - bases[k], threshold[:, k], atol=1e-6)
        np.testing.assert_allclose(by_style["-"][k].get_xdata(), 2.0 * np.arange(12))
        np.testing.assert_allclose(segments(ax, k)[:, 0, 0], 2.0 * spikes[:, k].nonzero().flatten())
    span = threshold.max().item() + 0.5
    assert np.diff(bases).min() > span, "traces do not overlap"
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", "b", "c"]


def test_names_of_many_traces_do_not_lie_on_each_other(ax):
    plot.traces(torch.rand(12, 60), ax=ax)
    assert [t.get_text() for t in ax.get_yticklabels()] == [f"neuron {k}" for k in range(0, 60, 3)]


def test_one_step_of_a_trace_is_seen(ax):
    plot.traces(torch.rand(1, 2), ax=ax)
    assert {line.get_marker() for line in ax.lines} == {"."}


def test_one_trace_keeps_its_scale(ax):
    v = torch.linspace(-70, -50, 9)
    plot.traces(v, ax=ax, threshold=-50.0)
    np.testing.assert_allclose(ax.lines[1].get_ydata(), v)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), -50.0)
    assert ax.get_ylabel() == "membrane" and len(ax.lines) == 2 and not ax.collections


def test_traces_refuse_what_does_not_fit(ax):
    v = torch.rand(10, 3)
    with pytest.raises(PictureError, match=r"`spikes` is \[10, 2\]"):
        plot.traces(v, torch.zeros(10, 2), ax=ax)
    with pytest.raises(PictureError, match=r"`threshold` \[4\] does not fit"):
        plot.traces(v, ax=ax, threshold=torch.zeros(4))


# --- rates --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dt, unit", [(None, 1.0), (2.0, 500.0)])
def test_rate_histogram_counts_neurons(ax, dt, unit):
    spikes = torch.zeros(10, 2, 4)
    spikes[0, 0, :3] = spikes[:, 1, 0] = 1.0  # three neurons at 0.1, one at 1, four silent
    plot.rate_histogram(spikes, ax=ax, bins=10, dt=dt)
    assert [bar.get_height() for bar in ax.patches] == [4, 3, 0, 0, 0, 0, 0, 0, 0, 1]
    assert ax.patches[-1].get_x() + ax.patches[-1].get_width() == pytest.approx(unit)
    assert ax.lines[0].get_xdata()[0] == pytest.approx(13 / 80 * unit)
    assert "silent 50%" in ax.texts[0].get_text()


def test_rate_histogram_of_silence(ax):
    plot.rate_histogram(torch.zeros(5, 4), ax=ax, bins=3)
    assert [bar.get_height() for bar in ax.patches] == [4, 0, 0]


def test_heat_map_over_time(ax):
    spikes = some_spikes(25, 6)
    plot.heat_map(spikes, ax=ax, window=10)
    (mesh,) = ax.collections
    expected = torch.stack([part.mean(0) for part in spikes.split(10)], dim=1)  # the last one has 5 steps
    np.testing.assert_allclose(mesh.get_array().reshape(6, 3), expected, rtol=1e-6)
    np.testing.assert_allclose(mesh.get_coordinates()[0, :, 0], [0, 10, 20, 25])
    assert len(ax.figure.axes) == 2, "a color bar"


def test_heat_map_by_place(ax):
    spikes = some_spikes(20, 3, 5)
    plot.heat_map(spikes, ax=ax, dt=1.0)
    np.testing.assert_allclose(ax.images[0].get_array(), 1000 * spikes.mean(0), rtol=1e-6)
    assert ax.figure.axes[1].get_ylabel() == "rate (Hz)"
    with pytest.raises(PictureError, match=r"not \[4, 1, 2, 3\]"):
        plot.heat_map(torch.zeros(4, 1, 2, 3), ax=ax)


def several_spikes():
    """Neurons at 3 and at 1 per step, one silent, one whose signed spikes cancel, and one below 0."""
    spikes = torch.zeros(10, 5)
    spikes[:, 0], spikes[::2, 1], spikes[::2, 3], spikes[1::2, 3], spikes[:, 4] = 3.0, 2.0, 1.0, -1.0, -1.0
    return spikes


@pytest.mark.parametrize("dt, unit", [(None, 1.0), (2.0, 500.0)])
def test_several_spikes_of_a_step_are_counted(ax, dt, unit):
    spikes = several_spikes()
    plot.rate_histogram(spikes, ax=ax, bins=4, dt=dt)
    assert [bar.get_height() for bar in ax.patches] == [1, 2, 1, 1]  # from -1 to 3
    assert ax.lines[0].get_xdata()[0] == pytest.approx(0.6 * unit)
    assert ax.texts[0].get_text() == f"mean {0.6 * unit:.3g}, silent 20%"
    by_time, by_place = plot.heat_map(spikes, window=10, dt=dt), plot.heat_map(spikes[:, None], dt=dt)
    for mesh in (*by_time.collections, *by_place.images):
        np.testing.assert_allclose(np.ravel(mesh.get_array()), np.array([3.0, 1.0, 0.0, 0.0, -1.0]) * unit)
        assert mesh.get_clim() == (-unit, 3 * unit)
    rate = flexsn.monitor(model := torch.nn.Identity(), layers=[""])
    with rate:
        model(spikes[:, None])
    assert rate[""].rate * unit == pytest.approx(ax.lines[0].get_xdata()[0])


def test_several_spikes_of_a_step_are_one_bar(ax):
    assert len(segments(plot.raster(several_spikes(), ax=ax))) == 10 + 5 + 10 + 10
    plot.traces(torch.rand(10, 5), several_spikes(), ax=plt.subplots()[1])


@pytest.mark.parametrize("draw", [plot.rate_histogram, plot.heat_map])
def test_rates_are_finite(draw, ax):
    with pytest.raises(PictureError, match=f"^{draw.__name__} draws rates, and 1 of 10 values are infinite"):
        draw(torch.tensor([[0.0] * 9 + [float("inf")]]), ax=ax)
    assert not ax.has_data()


# --- surrogates ---------------------------------------------------------------------------------------------------------------
def test_surrogate_curves_are_step_and_gradient(ax):
    plot.surrogate_curves({"one": surrogate.atan, "two": surrogate.gaussian}, ax=ax, span=2.0, points=81)
    assert [line.get_label() for line in ax.lines] == ["spike", "one", "two"], "the step is the same: drawn once"
    step, one, two = ax.lines
    x = one.get_xdata()
    np.testing.assert_allclose(x, np.linspace(-2, 2, 81), atol=1e-12)
    np.testing.assert_array_equal(step.get_ydata(), x >= 0)
    np.testing.assert_allclose(one.get_ydata(), 1.0 / (1.0 + (np.pi * x) ** 2))
    np.testing.assert_allclose(two.get_ydata(), np.exp(-0.5 * (x / 0.5) ** 2) / (0.5 * np.sqrt(2 * np.pi)))


def test_surrogates_that_step_otherwise_are_drawn_so(ax):
    def late(x):
        return torch.sigmoid(x)

    with torch.no_grad():
        plot.surrogate_curves([surrogate.atan, late], ax=ax, points=21)
    assert len(ax.lines) == 4 and ax.lines[3].get_label() == "late"


# --- phase plane --------------------------------------------------------------------------------------------------------------
def nullclines(ax):
    return [c for c in ax.collections if isinstance(c, QuadContourSet) and not c.filled]


def test_nullclines_are_where_nothing_changes(ax):
    plot.phase_plane(resonator, ax=ax, inputs=[0.4], x=(-1, 1.5), y=(-1, 2))
    first, second = nullclines(ax)
    for path in first.get_paths():  # x - u - 0.3 v = 0
        v, u = path.vertices.T
        np.testing.assert_allclose(u, 0.4 - 0.3 * v, atol=1e-9)
    assert len(np.concatenate([p.vertices for p in first.get_paths()])) > 50
    for path in second.get_paths():  # v = 0
        np.testing.assert_allclose(path.vertices[:, 0], 0.0, atol=1e-9)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("v", "u")


def test_no_nullcline_along_the_threshold(ax):
    """There the reset makes the change jump through zero."""
    plot.phase_plane(resonator, ax=ax, x=(-1, 1.5), y=(-1, 2))
    for lines in nullclines(ax):
        vertices = np.concatenate([p.vertices for p in lines.get_paths()])
        v, u = vertices.T
        assert (v + 0.1 * (-u - 0.3 * v) < 1.0).all()
    shaded = [c for c in ax.collections if isinstance(c, QuadContourSet) and c.filled]
    assert len(shaded) == 1
    v, u = shaded[0].get_paths()[0].vertices.T
    assert (v + 0.1 * (-u - 0.3 * v) > 1.0 - 0.03).all()


def test_arrows_point_where_the_step_goes(ax):
    plot.phase_plane(resonator, ax=ax, x=(-0.5, 0.5), y=(-0.5, 0.5))
    (arrows,) = (c for c in ax.collections if isinstance(c, Quiver))
    v, u = arrows.XY.T
    dv, du = 0.1 * (-u - 0.3 * v), 0.1 * v
    np.testing.assert_allclose(arrows.U * du, arrows.V * dv, atol=1e-12)
    away = np.hypot(v, u) > 0.1
    assert (arrows.U * dv + arrows.V * du)[away].min() > 0
    np.testing.assert_allclose(np.hypot(arrows.U, arrows.V)[away], 1.0)


def test_trajectories_are_runs_of_the_core(ax):
    plot.phase_plane(resonator, ax=ax, inputs=[1.5], x=(-2, 2), y=(-2, 3), starts=[(0.1, -0.2)], steps=50)
    path, start, stars = (line for line in ax.lines if len(line.get_xdata()))
    x = torch.full((50, 1), 1.5, dtype=torch.float64)
    first = [torch.tensor([0.1], dtype=torch.float64), torch.tensor([-0.2], dtype=torch.float64)]
    run = flexsn.scan(resonator, [x], first, store_state_seqs=True, backend="torch")
    np.testing.assert_allclose(path.get_xdata()[1:], run.states[0][:, 0])
    np.testing.assert_allclose(path.get_ydata()[1:], run.states[1][:, 0])
    assert (start.get_xdata(), start.get_ydata()) == (0.1, -0.2)
    assert len(stars.get_xdata()) == run.outputs[0].sum() > 0


def test_phase_plane_of_other_cores(ax):
    """Params, no spikes among the outputs, names, a state that never stands still."""

    def drift(x, a, b, w):
        return a + b, a + 1.0, b - w * b + x

    plot.phase_plane(drift, ax=ax, params=[torch.tensor(0.5)], names=("up", "down"), points=51)
    assert len(nullclines(ax)) == 1 and (ax.get_xlabel(), ax.get_ylabel()) == ("up", "down")
    assert not [c for c in ax.collections if isinstance(c, QuadContourSet) and c.filled]
    drawn(ax)
    with pytest.raises(ReturnCountError, match=r"core `one_state`.*expected 2 states"):

        def one_state(x, v, w):
            return v + w

        plot.phase_plane(one_state, ax=ax)


@pytest.mark.parametrize("neuron", [flexsn.ALIF(), flexsn.FlexSN(resonator, num_states=2), flexsn.CubaLIF(learn_tau=True)], ids=repr)
def test_phase_plane_of_a_module_is_that_of_its_core(ax, neuron):
    neuron(torch.rand(4, 3))
    before = [v.clone() for v in neuron.states], neuron.backend
    options = {"x": (-1.0, 1.5), "y": (-0.5, 2.0), "points": 41, "starts": [(0.2, 0.1)], "steps": 20, "inputs": [0.7]}
    plot.phase_plane(neuron, ax=ax, **options)
    core = plot.phase_plane(neuron.core, **options)
    assert len(ax.lines) == len(core.lines) >= 4
    for one, other in zip(ax.lines, core.lines, strict=True):
        np.testing.assert_allclose(one.get_xydata(), other.get_xydata())
    assert (ax.get_xlabel(), ax.get_ylabel()) == (core.get_xlabel(), core.get_ylabel())
    assert all(torch.equal(a, b) for a, b in zip(neuron.states, before[0], strict=True)) and neuron.backend == before[1]


def test_phase_plane_of_a_copied_module_is_that_of_the_copy(ax):
    """Whose parameters are its own, whatever its core was made with."""
    neuron = flexsn.CubaLIF(tau=2.0, learn_tau=True)
    other = copy.deepcopy(neuron)
    with torch.no_grad():
        other.tau_syn.fill_(8.0)
    paths = []
    for layer in (neuron, other):
        own = plot.phase_plane(layer, points=21, starts=[(0.1, 0.5)], steps=3)
        paths.append(own.lines[-2].get_ydata())
    np.testing.assert_allclose(paths[0], 0.5 * 0.5 ** np.arange(4))
    np.testing.assert_allclose(paths[1], 0.5 * 0.875 ** np.arange(4))


# --- animation ----------------------------------------------------------------------------------------------------------------
def test_animation_shows_every_frame(ax, tmp_path):
    frames = torch.rand(4, 3, 5)
    movie = plot.animate(frames, ax=ax)
    shown = []
    movie._func(2)
    np.testing.assert_allclose(ax.images[0].get_array(), frames[2])
    assert ax.get_title() == "step 2 of 4"
    movie.save(tmp_path / "movie.gif", writer="pillow", dpi=30, progress_callback=lambda k, n: shown.append(k))
    from PIL import Image

    with Image.open(tmp_path / "movie.gif") as gif:
        assert gif.n_frames == 4 and shown == [0, 1, 2, 3]


def test_animation_of_events_tells_polarities_apart(ax, tmp_path):
    events = torch.zeros(2, 2, 3, 3)
    events[0, 0, 1, 1] = events[1, 1, 2, 0] = 2.0
    movie = plot.animate(events)
    movie.save(tmp_path / "movie.gif", writer="pillow", dpi=30)
    image = movie._fig.axes[0].images[0]
    for t, place, color in ((0, (1, 1), plot.BLUE), (1, (2, 0), plot.ORANGE)):
        movie._func(t)
        pixels = image.get_array()
        np.testing.assert_allclose(pixels[place], to_rgba(color)[:3], atol=0.01)
        assert (np.asarray(pixels).reshape(9, 3) == 1.0).all(1).sum() == 8, "white but for the event"
    with pytest.raises(PictureError, match=r"not \[5, 3, 4, 4\]"):
        plot.animate(torch.zeros(5, 3, 4, 4), ax=ax)


# --- values, and what is installed --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "make", [torch.Tensor.bfloat16, torch.Tensor.bool, torch.Tensor.numpy, torch.Tensor.tolist], ids=lambda f: f.__name__
)
def test_kinds_of_values(ax, make):
    spikes = some_spikes(6, 4)
    plot.raster(make(spikes), ax=ax)
    assert len(segments(ax)) == spikes.sum()


def test_matplotlib_is_imported_when_drawing():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import torch, flexsn\n"
        "try:\n    flexsn.plot.raster(torch.ones(2, 2))\nexcept ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path(flexsn.__file__).parent.parent
    )
    assert done.returncode == 0, done.stderr
    assert 'pip install "flexsn[plot]"' in done.stdout


# --- mistakes -----------------------------------------------------------------------------------------------------------------
SEQUENCES = {  # by function: what it draws, and of which shape
    "raster": (plot.raster, (20, 5)),
    "traces": (plot.traces, (20, 5)),
    "rate_histogram": (plot.rate_histogram, (20, 5)),
    "heat_map": (plot.heat_map, (20, 5)),
    "animate": (plot.animate, (20, 5, 5)),
}
NO_SEQUENCES = {
    "0-dim": lambda x: torch.tensor(1.0),
    "a number": lambda x: 1.0,
    "None": lambda x: None,
    "a word": lambda x: "spikes",
    "a dict": lambda x: {"spikes": x},
    "ragged lists": lambda x: [[1.0], [1.0, 2.0]],
    "ragged tensors": lambda x: [torch.ones(2), torch.ones(3)],
    "complex": lambda x: x.to(torch.complex64),
    "sparse": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
    "no step": lambda x: x[:0],
    "no neuron": lambda x: x[:, :0],
}


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("wrong", NO_SEQUENCES)
def test_what_is_no_sequence_is_refused(name, wrong):
    draw, shape = SEQUENCES[name]
    with pytest.raises(PictureError, match=f"^{name}"):
        draw(NO_SEQUENCES[wrong](torch.rand(shape)))


@pytest.mark.parametrize("name", ["raster", "traces", "rate_histogram", "heat_map"])
def test_lists_are_drawn_as_tensors_are(name, ax):
    draw, shape = SEQUENCES[name]
    values = (torch.rand(shape) < 0.5).float()
    kinds = [values, values.tolist(), list(values), values.bool(), values.bfloat16()]
    pictures = [drawn(draw(kind)).figure.canvas.buffer_rgba() for kind in kinds]
    assert all(np.array_equal(picture, pictures[0]) for picture in pictures) and np.asarray(pictures[0]).min() < 255


V, SPIKES = torch.rand(20, 5), some_spikes(20, 5)
NAN = float("nan")
MISTAKES = {
    "raster": (lambda **kw: plot.raster(SPIKES, **kw), {
        "dt": (0, -1.0, NAN, "1", True), "height": (0.0, -1, "a"), "color": ("no color", 3, ["red", "blue"]), "ax": (3, plt)}),
    "traces": (lambda **kw: plot.traces(V, **kw), {
        "dt": (0, "1"), "labels": (["a"], "abcde", 5), "reset": ("never", torch.rand(3), [[1.0], [1.0, 2.0]]), "threshold": ("high", 2j),
        "spikes": (SPIKES[:10], SPIKES[:, :2])}),
    "rate_histogram": (lambda **kw: plot.rate_histogram(SPIKES, **kw), {"dt": (0,), "bins": (0, -1, 2.5, "auto", True)}),
    "heat_map": (lambda **kw: plot.heat_map(SPIKES, **kw), {"dt": (0,), "window": (0, -1, 2.5, "a")}),
    "surrogate_curves": (lambda **kw: plot.surrogate_curves(surrogate.atan, **kw), {"span": (0, -1.0, "a"), "points": (0, 1, 2.5)}),
    "phase_plane": (lambda **kw: plot.phase_plane(resonator, **kw), {
        "inputs": (3, "a", ["a"], [NAN]), "x": (3, (1, 1), (1, -1), ("a", "b"), (0, 1, 2)), "y": (None,), "points": (0, 2, 2.5),
        "steps": (0, -1, "a"), "starts": ((0, 0), [(0,)], [(0, 0, 0)], "ab", [("a", 0)]), "names": (("v",), "vu"), "params": (3, torch.ones(2))}),
    "animate": (lambda **kw: plot.animate(torch.rand(3, 4, 4), **kw), {"interval": (0, "a")}),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_options_out_of_range_are_named(name):
    draw, options = MISTAKES[name]
    for option, values in options.items():
        for value in values:
            with pytest.raises(PictureError, match=f"`{option}`"):
                draw(**{option: value})


def test_what_is_no_surrogate_is_refused(ax):
    for wrong in (3, "atan", [], {}):
        with pytest.raises(PictureError, match="surrogate_curves draws functions"):
            plot.surrogate_curves(wrong, ax=ax)
    for wrong in (["atan"], {"atan": 3}, [surrogate.atan, None]):
        with pytest.raises(PictureError, match=r"surrogate_curves draws functions .*, and `"):
            plot.surrogate_curves(wrong, ax=ax)
    for wrong, why in ((lambda x: 3, "for every x"), (lambda x: x[:3], "for every x"), (lambda x: x.detach(), "no gradient")):
        with pytest.raises(PictureError, match=why):
            plot.surrogate_curves(wrong, ax=ax)
    with pytest.raises(ArgumentError, match="poisson_pass needs noise"):
        plot.surrogate_curves(surrogate.poisson_pass, ax=ax)
    assert not ax.has_data()
    plot.surrogate_curves([surrogate.atan, surrogate.atan(alpha=5.0)], ax=ax)
    assert [line.get_label() for line in ax.lines] == ["spike", "atan", "atan(alpha=5)"]


def test_phase_planes_are_those_of_one_neuron_of_two_states(ax):
    for wrong, why in (
        (flexsn.LIF(), "core `LIF`: has 1 states"),
        (flexsn.HodgkinHuxley(), "has 4 states"),
        (torch.nn.Sequential(flexsn.ALIF()), "not of a network"),
        (flexsn.ALIF(learn_tau=True, per_channel=3), r"is many neurons: `tau` is \[3\]"),
        (3, "the core must be callable, not int"),
        (torch.nn.Linear(2, 2), r"takes 1 operands \(input\) but was given 3"),
    ):
        with pytest.raises(FlexSNError, match=why):
            plot.phase_plane(wrong, ax=ax)
    with pytest.raises(PictureError, match="has 1 values for 2 inputs"):
        plot.phase_plane(flexsn.TwoCompartmentLIF(), ax=ax, inputs=[0.5])
    with pytest.raises(PictureError, match="a module has its own params"):
        plot.phase_plane(flexsn.ALIF(), ax=ax, params=[torch.ones(())])
    assert not ax.has_data()
    plot.phase_plane(flexsn.TwoCompartmentLIF(), ax=ax, points=21)
    assert ax.has_data()


def test_traces_of_what_diverges(ax):
    v = torch.rand(20, 2)
    v[10:, 0] = float("inf")
    v[15:, 1] = NAN
    drawn(plot.traces(v, ax=ax, threshold=1.0))
    assert all(np.isfinite(ax.get_ylim()))
    with pytest.raises(PictureError, match="no value is finite"):
        plot.traces(torch.full((4, 2), NAN), ax=ax)
