"""Pictures of what spiking neurons do, drawn with matplotlib (`pip install "flexsn[plot]"`).

Every function draws into the `Axes` it is given, or into a new figure's, and returns that `Axes`; `animate` returns the
animation. Nothing is shown, saved or configured: that stays matplotlib's business. `with plt.rc_context(plot.STYLE):`
gives the plain look of the project's own pictures.

Sequences are `[T, ...]`, time first, tensors (detached and brought to the CPU here) or arrays. Time is in steps; with
`dt`, the length of a step in ms, it is in ms and rates are in Hz.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import PictureError
from .plot_data import (
    TwoStates,
    array,
    by_name,
    color_of_each,
    counts_of,
    length,
    level,
    names_of,
    number,
    points_of,
    rows,
    same,
    span_of,
    spikes_of,
    steps_of,
    whole,
)

if TYPE_CHECKING:
    import numpy
    from matplotlib.animation import FuncAnimation
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

__all__ = ["STYLE", "animate", "heat_map", "phase_plane", "raster", "rate_histogram", "surrogate_curves", "traces"]

INK, GREY, BLUE, ORANGE = "#22262b", "#8d949c", "#1f5f99", "#d9571c"
COLORS = (BLUE, ORANGE, "#3a7d44", "#8e4585", "#b8860b", "#2a9d9d", INK)
DASHES = ("-", "--", ":", "-.")
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans", "font.size": 9.5, "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.titlepad": 8, "axes.labelcolor": INK, "axes.edgecolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8, "legend.frameon": False, "figure.facecolor": "white",
}  # fmt: skip


def raster(spikes: Any, ax: Axes | None = None, *, dt: float | None = None, color: Any = INK, height: float = 0.8) -> Axes:
    """Spikes as bars: time to the right, one row per neuron.

    Args:
        spikes: `[T, n]` (or `[T]`); a spike is whatever is not 0. A layer's output `[T, batch, n]` holds many samples:
            choose one, `spikes[:, 0]`.
        color: one color, or one per neuron.
        height: of a bar, in rows.

    Raises:
        PictureError: `spikes` has more dimensions, or a NaN.
    """
    values = spikes_of(rows(spikes, "raster"), "raster")
    unit, height = length(dt), number(height, "height", above=0.0)
    ax = _axes(ax)
    step, neuron = values.nonzero()
    own = color_of_each(color, values.shape[1])
    colors = color if own is None else [own[k] for k in neuron]
    width = max(0.4, min(2.5, 240 / len(values)))
    ax.vlines(step * unit, neuron - height / 2, neuron + height / 2, colors=colors, lw=width, snap=False)  # bars of less than a pixel stay
    _time_axis(ax, len(values), dt)
    ax.set(ylim=(-0.7, values.shape[1] - 0.3), ylabel="neuron")
    _whole_numbers(ax.yaxis)
    return ax


def traces(
    membrane: Any, spikes: Any = None, ax: Axes | None = None, *, threshold: Any = None, reset: Any = None, dt: float | None = None,
    labels: Sequence[str] | None = None,
) -> Axes:  # fmt: skip
    """Membrane potentials over time, one above the other, with threshold (dashed), reset (dotted) and spikes (bars).

    Args:
        membrane: `[T, n]` or `[T]`, for instance a neuron's `state_seqs[0][:, 0, :5]`. It is the state at the end of a step,
            so after a reset; the spike itself is seen in `spikes`.
        spikes: of the same shape, or None.
        threshold, reset: a number, one per neuron `[n]`, or, for one that moves, `[T, n]`; None draws none.
        labels: one name per neuron.

    Raises:
        PictureError: shapes differ.
    """
    import numpy as np

    v = rows(membrane, "traces").astype(float)
    fired = None if spikes is None else spikes_of(same(rows(spikes, "traces"), v, "spikes"), "traces")
    levels = {"--": level(threshold, v, "threshold"), ":": level(reset, v, "reset")}
    if labels is not None:
        labels = names_of(labels, v.shape[1], "labels")
    known = np.concatenate([v, *(found for found in levels.values() if found is not None)])
    known = known[np.isfinite(known)]
    if not known.size:
        raise PictureError("traces has nothing to draw: no value is finite")
    low, high = known.min(), known.max()
    span, time = (high - low) or 1.0, np.arange(len(v)) * length(dt)
    ax = _axes(ax)
    bases = np.arange(v.shape[1]) * 1.25 * span
    for k, base in enumerate(bases):
        for style, found in levels.items():
            if found is not None:
                ax.plot(time, base + found[:, k], color=GREY, lw=0.9, ls=style, zorder=1)
        ax.plot(time, base + v[:, k], color=BLUE, lw=1.4, marker="." if len(v) == 1 else None)
        if fired is not None:
            ax.vlines(time[fired[:, k]], base + high, base + high + 0.15 * span, color=ORANGE, lw=1.5)
    if v.shape[1] == 1 and labels is None:
        ax.set_ylabel("membrane")
    else:
        every = 1 if labels is not None else -(-v.shape[1] // 20)  # names for more neurons would lie on each other
        shown = range(0, v.shape[1], every)
        ax.set_yticks((bases + (low + high) / 2)[::every], labels=labels or [f"neuron {k}" for k in shown])
        ax.tick_params(axis="y", length=0)
    _time_axis(ax, len(v), dt)
    return ax


def rate_histogram(spikes: Any, ax: Axes | None = None, *, bins: int = 20, dt: float | None = None) -> Axes:
    """How many neurons fire how often: the rates over T of all neurons of `spikes` `[T, *shape]`, their mean as a line.

    A rate is spikes per step, or per second (Hz) with `dt`; a value of 3 is three spikes, as in `flexsn.monitor`. A batch
    dimension counts as so many neurons.

    Raises:
        PictureError: `spikes` has a value that is not finite.
    """
    import numpy as np

    found = steps_of(spikes, "rate_histogram", "[T, ...]", range(1, 64), "Give spikes over time, [T, *shape].")
    values, fired = counts_of(found, "rate_histogram")
    rates, silent = values.mean(0).ravel() * _rate(dt), 1.0 - fired.any(0).mean()
    bins = whole(bins, "bins", 1)
    counts, edges = np.histogram(rates, bins, range=_range(rates, 1.0))
    ax = _axes(ax)
    ax.bar(edges[:-1], counts, np.diff(edges), align="edge", color=BLUE, edgecolor="white", lw=0.5)
    ax.axvline(rates.mean(), ymax=0.88, color=ORANGE, lw=1.5)
    words = f"mean {rates.mean():.3g}, silent {silent:.0%}"
    ax.text(1.0, 0.98, words, transform=ax.transAxes, ha="right", va="top", color=ORANGE)
    ax.set(xlabel=_rate_unit(dt), ylabel="neurons", ylim=(0, 1.14 * counts.max()))
    return ax


def heat_map(spikes: Any, ax: Axes | None = None, *, window: int = 10, dt: float | None = None, cmap: str = "magma") -> Axes:
    """Firing rates as colors: `[T, n]` by windows of `window` steps and neuron, `[T, H, W]` over all T by place.

    The last window is shorter where `window` does not divide T. A rate is spikes per step, or Hz with `dt`; a value of 3 is three
    spikes, as in `flexsn.monitor`. Colors go from 0 (or the lowest rate, if below) to the highest, and without a spike to one in
    every step.

    Raises:
        PictureError: `spikes` has another number of dimensions, or a value that is not finite.
    """
    import numpy as np

    found = steps_of(spikes, "heat_map", "[T, n] or [T, H, W]", (2, 3), "Choose a sample: `spikes[:, 0]`.")
    values = counts_of(found, "heat_map")[0] * _rate(dt)
    window = whole(window, "window", 1)
    ax = _axes(ax)
    if values.ndim == 3:
        rates = values.mean(0)
        mesh: Any = ax.imshow(rates, cmap=cmap, interpolation="nearest")
        ax.set(xlabel="column", ylabel="row")
        _whole_numbers(ax.xaxis, ax.yaxis)
    else:
        starts = np.arange(0, len(values), window)
        steps = np.diff(starts, append=len(values))
        rates = np.add.reduceat(values, starts, axis=0) / steps[:, None]
        edges = np.append(starts, len(values)) * length(dt)
        mesh = ax.pcolormesh(edges, np.arange(values.shape[1] + 1) - 0.5, rates.T, cmap=cmap)
        ax.set(xlabel=_time_unit(dt), ylabel="neuron")
        _whole_numbers(ax.yaxis)
    mesh.set_clim(*_range(rates, _rate(dt)))
    ax.figure.colorbar(mesh, ax=ax, label=_rate_unit(dt), pad=0.02)
    return ax


def surrogate_curves(
    functions: Callable[[Tensor], Tensor] | Sequence[Callable[[Tensor], Tensor]] | Mapping[str, Callable[[Tensor], Tensor]],
    ax: Axes | None = None, *, span: float = 1.5, points: int = 1001,
) -> Axes:  # fmt: skip
    """What surrogate spikes do at a distance `x` to threshold: forward in grey, the gradient, as autograd gives it, in color.

    Args:
        functions: one `x -> spike`, several, or several by name; by default a name has the settings in it, `atan(alpha=3)`.
        span: from `-span` to `span`.

    Raises:
        PictureError: what is given is no function, or gives no gradient.
    """
    named = by_name(functions)
    span, points = number(span, "span", above=0.0), whole(points, "points", 2)
    curves = {name: _curve(name, function, torch.linspace(-span, span, points, dtype=torch.float64)) for name, function in named.items()}
    ax = _axes(ax)
    steps: list[Any] = []
    for k, (name, (x, y, slope)) in enumerate(curves.items()):
        if not any((y == seen).all() for seen in steps):
            ax.plot(x, y, color=GREY, lw=1.6, label=None if steps else "spike", zorder=1)
            steps.append(y)
        ax.plot(x, slope, color=COLORS[k % len(COLORS)], ls=DASHES[k // len(COLORS) % len(DASHES)], lw=1.6, label=name)
    ax.set(xlabel="distance to threshold", ylabel="spike; its gradient", xlim=(-span, span))
    beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "fontsize": "xx-small", "ncols": -(-len(curves) // 30)}
    ax.legend(**(beside if len(curves) > 8 else {}))
    return ax


def phase_plane(
    core: Callable[..., Any], ax: Axes | None = None, *, inputs: Sequence[float] | None = None, params: Sequence[Tensor] = (),
    x: tuple[float, float] = (-1.0, 1.0), y: tuple[float, float] = (-1.0, 1.0), points: int = 201,
    starts: Sequence[tuple[float, float]] = (), steps: int = 200, names: tuple[str, str] | None = None,
) -> Axes:  # fmt: skip
    """The phase plane of a core of two states: where each of them stands still (nullclines), where both go, and how far.

    The core is run for one step on a grid of states, with its inputs held fixed. A nullcline is where one step leaves a
    state as it was, found by contouring the change; they cross at fixed points. States from which the step spikes (an
    output of zeros and ones) are shaded and take no part: there a reset makes the state jump.

    Args:
        core: `core(*inputs, x, y, *params) -> (*outputs, x, y)`, elementwise; or a `FlexSN` of two states, such as
            `flexsn.ALIF()`. What that carries is left alone.
        inputs: the value of each input; by default 0.
        params: what follows the states.
        x, y: the range of the first and of the second state.
        points: of the grid, along each side.
        starts: states from which trajectories of `steps` steps are drawn; spikes on them are marked.
        names: of the two states; by default the core's own.

    Raises:
        PictureError: the module does not have two states, or is many neurons (`per_channel`); a range or a start is none.
        OperandCountError, ReturnCountError: the core does not take so many inputs, two states and the params, or returns less.
    """
    import numpy as np

    neuron = TwoStates(core, inputs, params)
    x, y, points, steps = span_of(x, "x"), span_of(y, "y"), whole(points, "points", 3), whole(steps, "steps", 1)
    starts, (first, second) = points_of(starts, "starts"), neuron.names if names is None else names_of(names, 2, "names")
    xs, ys = np.linspace(*x, points), np.linspace(*y, points)
    grid = [torch.as_tensor(a, dtype=torch.float64) for a in np.meshgrid(xs, ys)]
    spike, change = _one_step(neuron, grid)
    ax = _axes(ax)
    if spike.any():
        ax.contourf(xs, ys, spike.astype(float), levels=[0.5, 1.5], colors=[ORANGE], alpha=0.12)
    dx, dy = (np.where(spike, np.nan, c) for c in change)
    few = slice(points // 40, None, max(1, points // 20))
    length = np.hypot(dx / (x[1] - x[0]), dy / (y[1] - y[0]))[few, few]
    with np.errstate(invalid="ignore", divide="ignore"):
        u, w = dx[few, few] / length / (x[1] - x[0]), dy[few, few] / length / (y[1] - y[0])
    ax.quiver(xs[few], ys[few], u, w, color=GREY, alpha=0.6, angles="uv", pivot="mid", scale=32, width=0.0025)
    for change_of, color, name in ((dx, BLUE, first), (dy, COLORS[2], second)):
        if (change_of < 0).any() and (change_of > 0).any():
            ax.contour(xs, ys, change_of, levels=[0.0], colors=[color], linewidths=1.8)
        ax.plot([], [], color=color, lw=1.8, label=f"{name} stands still")
    for start in starts:
        _trajectory(ax, neuron, start, steps)
    ax.set(xlabel=first, ylabel=second, xlim=x, ylim=y)
    ax.legend(loc="upper left", fontsize="small")
    return ax


def animate(sequence: Any, ax: Axes | None = None, *, interval: float = 60.0, cmap: str = "magma") -> FuncAnimation:
    """A sequence of pictures as an animation, one frame per step.

    Args:
        sequence: `[T, H, W]`, or events of two polarities `[T, 2, H, W]`, which are drawn blue (0) and orange (1).
        interval: between frames, in ms.

    Returns:
        The animation: keep it as long as it shall run, or `animation.save("x.gif", writer="pillow")`.

    Raises:
        PictureError: `sequence` has another shape.
    """
    from matplotlib.animation import FuncAnimation

    hint = "Choose a sample: `frames[:, 0]`."
    pictures = steps_of(sequence, "animate", "[T, H, W] or [T, 2, H, W]", (3, 4), hint).astype(float)
    if pictures.ndim == 4 and pictures.shape[1] != 2:
        raise PictureError(f"animate draws [T, H, W] or [T, 2, H, W], not {list(pictures.shape)}", hint=hint)
    frames, colors = _frames(pictures, cmap)
    interval = number(interval, "interval", above=0.0)
    ax = _axes(ax)
    image = ax.imshow(frames[0], interpolation="nearest", **colors)
    ax.set(xticks=[], yticks=[])
    title = ax.set_title(f"step 0 of {len(frames)}")

    def show(t: int) -> tuple[Any, Any]:
        image.set_data(frames[t])
        title.set_text(f"step {t} of {len(frames)}")
        return image, title

    return FuncAnimation(ax.figure, show, frames=len(frames), interval=interval)  # type: ignore[arg-type]  # a SubFigure will do


# --- parts -----------------------------------------------------------------------------------------------------------------
def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        if not hasattr(ax, "add_collection"):
            raise PictureError(f"`ax` must be an Axes of matplotlib, not {type(ax).__name__}", hint="Write `figure, ax = plt.subplots()`.")
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError('flexsn.plot draws with matplotlib, which is not installed: pip install "flexsn[plot]"') from error
    return plt.subplots(layout="constrained")[1]


def _time_unit(dt: float | None) -> str:
    return "time step" if dt is None else "time (ms)"


def _rate_unit(dt: float | None) -> str:
    return "spikes per step" if dt is None else "rate (Hz)"


def _rate(dt: float | None) -> float:
    """From spikes per step to the unit of a rate."""
    return 1.0 if dt is None else 1000.0 / length(dt)


def _range(rates: numpy.ndarray, alone: float) -> tuple[float, float]:
    """From 0 to the highest rate, or to `alone` where none is above; from the lowest if that is below 0."""
    return min(0.0, float(rates.min())), max(0.0, float(rates.max())) or alone


def _time_axis(ax: Axes, steps: int, dt: float | None) -> None:
    ax.set_xlim(-0.02 * steps * length(dt), 1.01 * steps * length(dt))
    ax.set_xlabel(_time_unit(dt))
    if dt is None:
        _whole_numbers(ax.xaxis)


def _whole_numbers(*axes: Axis) -> None:
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


def _curve(name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Places, spikes and slopes."""
    x.requires_grad_()
    with torch.enable_grad():
        y = function(x)
        if not isinstance(y, Tensor) or y.shape != x.shape:
            raise PictureError(f"`{name}` does not return a spike for every x", hint="It has to be elementwise: `x -> spike`.")
        if not y.requires_grad:
            raise PictureError(f"`{name}` has no gradient", hint="Make it of one of `flexsn.surrogate`.")
        (slope,) = torch.autograd.grad(y.sum(), x, allow_unused=True)
    return x.detach().numpy(), y.detach().numpy(), torch.zeros_like(x).numpy() if slope is None else slope.numpy()


def _fired(output: numpy.ndarray) -> numpy.ndarray | None:
    """Where an output of zeros and ones is one."""
    return output != 0 if ((output == 0) | (output == 1)).all() else None


def _one_step(neuron: TwoStates, grid: list[Tensor]) -> tuple[numpy.ndarray, list[numpy.ndarray]]:
    """Where on the grid a step spikes, and by how much it changes both states."""
    outputs, states = neuron.run(grid, 1)
    spikes = [fired for y in outputs if (fired := _fired(array(y[0], "an output"))) is not None]
    spike = spikes[0] if spikes else torch.zeros_like(grid[0], dtype=torch.bool).numpy()
    return spike, [array(new[0], "a state") - old.numpy() for new, old in zip(states, grid, strict=True)]


def _trajectory(ax: Axes, neuron: TwoStates, start: tuple[float, float], steps: int) -> None:
    import numpy as np

    outputs, states = neuron.run([torch.full((1,), value, dtype=torch.float64) for value in start], steps)
    path = np.stack([np.append(s0, array(s, "a state")) for s0, s in zip(start, states, strict=True)])
    ax.plot(*path, color=INK, lw=0.9, marker=".", ms=2.5, zorder=3)
    ax.plot(*path[:, :1], "o", color=INK, ms=5, zorder=3)
    fired = _fired(array(outputs[0], "an output")[:, 0])
    if fired is not None and fired.any():
        ax.plot(*path[:, :-1][:, fired], "*", color=ORANGE, ms=9, mew=0, zorder=4)


def _frames(pictures: numpy.ndarray, cmap: str) -> tuple[numpy.ndarray, dict[str, Any]]:
    """`[T, H, W]` or, for events, `[T, H, W, 3]`; and how `imshow` colors them."""
    import numpy as np

    if pictures.ndim == 3:
        return pictures, {"cmap": cmap, "vmin": float(pictures.min()), "vmax": float(pictures.max())}
    weight = (pictures / (pictures.max() or 1.0))[..., None]
    inks = [1.0 - np.array([int(c[i : i + 2], 16) for i in (1, 3, 5)]) / 255 for c in (BLUE, ORANGE)]
    return np.clip(1.0 - weight[:, 0] * inks[0] - weight[:, 1] * inks[1], 0.0, 1.0), {}
