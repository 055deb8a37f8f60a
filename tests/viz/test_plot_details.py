"""What a picture says beside its data: names in legends, ticks, colors of silence; and NaN, which is no spike."""

import pytest
import torch

from flexsn import plot, surrogate
from flexsn.errors import PictureError

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

NAN = float("nan")


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def ticks_seen(ax, axis):
    """Places of the ticks within the picture, once it is drawn."""
    ax.figure.canvas.draw()
    low, high = sorted(axis.get_view_interval())
    return [t for t in axis.get_majorticklocs() if low <= t <= high]


# --- surrogates ---------------------------------------------------------------------------------------------------------------
def labels(functions):
    return [line.get_label() for line in plot.surrogate_curves(functions).lines][1:]


def test_names_have_the_settings_in_them():
    many = [surrogate.atan, surrogate.atan(alpha=1.0), surrogate.atan(alpha=torch.tensor(2.5)), surrogate.atan(alpha=1.0)]
    assert labels(many) == ["atan", "atan(alpha=1)", "atan(alpha=2.5)", "atan(alpha=1) 2"]
    own = surrogate.custom_surrogate(gradient=torch.cos, inclusive=False)
    assert labels(own) == ["custom_surrogate(gradient=cos, inclusive=False)"]
    assert labels([surrogate.multi_level_spike_count(max_spike_count=3)]) == ["multi_level_spike_count(max_spike_count=3)"]
    assert labels({"mine": surrogate.atan(alpha=1.0)}) == ["mine"]


def test_a_long_legend_leaves_the_axes_their_room():
    functions = [getattr(surrogate, n) for n in surrogate.__all__ if n not in ("custom_surrogate", "poisson_pass", "SSO")]
    ax = plot.surrogate_curves(functions)
    ax.figure.canvas.draw()
    box = ax.get_position()
    assert box.height > 0.7 and box.width > 0.5, box
    legend = ax.get_legend().get_window_extent()
    assert not legend.overlaps(ax.get_window_extent()) and legend.x1 <= ax.figure.bbox.x1
    assert len({(line.get_color(), line.get_linestyle()) for line in ax.lines if line.get_color() != plot.GREY}) == len(functions), (
        "each looks different"
    )


# --- one neuron, no spike -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("draw", [plot.raster, plot.heat_map])
@pytest.mark.parametrize("neurons", [1, 2, 30])
def test_neurons_are_counted_in_whole_numbers(draw, neurons):
    ax = draw((torch.rand(20, neurons) < 0.5).float())
    seen = ticks_seen(ax, ax.yaxis)
    assert seen and all(t == int(t) for t in seen), seen


@pytest.mark.parametrize(("dt", "most"), [(None, 1.0), (2.0, 500.0)])
@pytest.mark.parametrize("shape", [(20, 5), (20, 3, 4)], ids=str)
def test_silence_has_the_lowest_color(shape, dt, most):
    ax = plot.heat_map(torch.zeros(shape), dt=dt)
    (mesh,) = [*ax.collections, *ax.images]
    assert mesh.get_clim() == (0.0, most) and mesh.norm(0.0) == 0.0
    bar = ax.figure.axes[1]
    bar.figure.canvas.draw()
    assert bar.get_ylim() == (0.0, most)


# --- NaN ----------------------------------------------------------------------------------------------------------------------
DRAW = {
    "raster": plot.raster,
    "heat_map": plot.heat_map,
    "rate_histogram": plot.rate_histogram,
    "traces": lambda spikes: plot.traces(torch.rand(20, 5), spikes),
}


@pytest.mark.parametrize("name", DRAW)
@pytest.mark.parametrize("make", [torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.numpy], ids=lambda f: f.__name__)
def test_nan_is_no_spike(name, make):
    spikes = (torch.rand(20, 5) < 0.3).float()
    DRAW[name](make(spikes))
    spikes[3, 2] = spikes[4, 2] = NAN
    with pytest.raises(PictureError, match=f"^{name} draws spikes, and 2 of 100 values are NaN\n"):
        DRAW[name](make(spikes))
