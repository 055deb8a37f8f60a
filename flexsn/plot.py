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

from .errors import PictureError
from .scan import scan
from .signature import core_name

if TYPE_CHECKING:
    import numpy
    from matplotlib.animation import FuncAnimation
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

__all__ = ["STYLE", "animate", "heat_map", "phase_plane", "raster", "rate_histogram", "surrogate_curves", "traces"]

INK, GREY, BLUE, ORANGE = "#22262b", "#8d949c", "#1f5f99", "#d9571c"
COLORS = (BLUE, ORANGE, "#3a7d44", "#8e4585", "#b8860b", "#2a9d9d", INK)
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
        PictureError: `spikes` has more dimensions.
    """
    values = _rows(spikes, "raster")
    ax = _axes(ax)
    step, neuron = values.nonzero()
    colors = color if isinstance(color, str) or len(color) != values.shape[1] else [color[k] for k in neuron]
    width = max(0.4, min(2.5, 240 / len(values)))
    ax.vlines(step * (dt or 1.0), neuron - height / 2, neuron + height / 2, colors=colors, lw=width)
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

    v = _rows(membrane, "traces").astype(float)
    fired = None if spikes is None else _same(_rows(spikes, "traces"), v, "spikes")
    levels = {"--": _level(threshold, v, "threshold"), ":": _level(reset, v, "reset")}
    ax = _axes(ax)
    known = [v, *(level for level in levels.values() if level is not None)]
    low, high = min(a.min() for a in known), max(a.max() for a in known)
    span, time = (high - low) or 1.0, np.arange(len(v)) * (dt or 1.0)
    bases = np.arange(v.shape[1]) * 1.25 * span
    for k, base in enumerate(bases):
        for style, level in levels.items():
            if level is not None:
                ax.plot(time, base + level[:, k], color=GREY, lw=0.9, ls=style, zorder=1)
        ax.plot(time, base + v[:, k], color=BLUE, lw=1.4)
        if fired is not None:
            ax.vlines(time[fired[:, k] != 0], base + high, base + high + 0.15 * span, color=ORANGE, lw=1.5)
    if v.shape[1] == 1 and labels is None:
        ax.set_ylabel("membrane")
    else:
        ax.set_yticks(bases + (low + high) / 2, labels=labels or [f"neuron {k}" for k in range(v.shape[1])])
        ax.tick_params(axis="y", length=0)
    _time_axis(ax, len(v), dt)
    return ax


def rate_histogram(spikes: Any, ax: Axes | None = None, *, bins: int = 20, dt: float | None = None) -> Axes:
    """How many neurons fire how often: the rates over T of all neurons of `spikes` `[T, *shape]`, their mean as a line.

    A rate is spikes per step, or per second (Hz) with `dt`; a batch dimension counts as so many neurons.
    """
    import numpy as np

    rates = (_array(spikes) != 0).mean(0).ravel() * (1000.0 / dt if dt else 1.0)
    counts, edges = np.histogram(rates, bins, range=(0.0, float(rates.max()) or 1.0))
    ax = _axes(ax)
    ax.bar(edges[:-1], counts, np.diff(edges), align="edge", color=BLUE, edgecolor="white", lw=0.5)
    ax.axvline(rates.mean(), ymax=0.88, color=ORANGE, lw=1.5)
    words = f"mean {rates.mean():.3g}, silent {(rates == 0).mean():.0%}"
    ax.text(1.0, 0.98, words, transform=ax.transAxes, ha="right", va="top", color=ORANGE)
    ax.set(xlabel=_rate_unit(dt), ylabel="neurons", ylim=(0, 1.14 * counts.max()))
    return ax


def heat_map(spikes: Any, ax: Axes | None = None, *, window: int = 10, dt: float | None = None, cmap: str = "magma") -> Axes:
    """Firing rates as colors: `[T, n]` by windows of `window` steps and neuron, `[T, H, W]` over all T by place.

    The last window is shorter where `window` does not divide T. A rate is spikes per step, or Hz with `dt`.

    Raises:
        PictureError: `spikes` has another number of dimensions.
    """
    import numpy as np

    fired = (_array(spikes) != 0).astype(float) * (1000.0 / dt if dt else 1.0)
    if fired.ndim not in (2, 3):
        raise PictureError(f"heat_map draws [T, n] or [T, H, W], not {list(fired.shape)}", hint="Choose a sample: `spikes[:, 0]`.")
    ax = _axes(ax)
    if fired.ndim == 3:
        mesh: Any = ax.imshow(fired.mean(0), cmap=cmap, vmin=0.0, interpolation="nearest")
        ax.set(xlabel="column", ylabel="row")
        _whole_numbers(ax.xaxis, ax.yaxis)
    else:
        starts = np.arange(0, len(fired), window)
        steps = np.diff(starts, append=len(fired))
        rates = np.add.reduceat(fired, starts, axis=0) / steps[:, None]
        edges = np.append(starts, len(fired)) * (dt or 1.0)
        mesh = ax.pcolormesh(edges, np.arange(fired.shape[1] + 1) - 0.5, rates.T, cmap=cmap, vmin=0.0)
        ax.set(xlabel=_time_unit(dt), ylabel="neuron")
        _whole_numbers(ax.yaxis)
    ax.figure.colorbar(mesh, ax=ax, label=_rate_unit(dt), pad=0.02)
    return ax


def surrogate_curves(
    functions: Callable[[Tensor], Tensor] | Sequence[Callable[[Tensor], Tensor]] | Mapping[str, Callable[[Tensor], Tensor]],
    ax: Axes | None = None, *, span: float = 1.5, points: int = 1001,
) -> Axes:  # fmt: skip
    """What surrogate spikes do at a distance `x` to threshold: forward in grey, the gradient, as autograd gives it, in color.

    Args:
        functions: one `x -> spike`, several, or several by name.
        span: from `-span` to `span`.
    """
    if callable(functions):
        functions = [functions]
    named = functions if isinstance(functions, Mapping) else {core_name(f): f for f in functions}
    ax = _axes(ax)
    steps: list[Any] = []
    for k, (name, function) in enumerate(named.items()):
        x = torch.linspace(-span, span, points, dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():
            y = function(x)
            (slope,) = torch.autograd.grad(y.sum(), x)
        if not any((y == seen).all() for seen in steps):
            ax.plot(_array(x), _array(y), color=GREY, lw=1.6, label=None if steps else "spike", zorder=1)
            steps.append(y.detach())
        ax.plot(_array(x), _array(slope), color=COLORS[k % len(COLORS)], lw=1.6, label=name)
    ax.set(xlabel="distance to threshold", ylabel="spike; its gradient", xlim=(-span, span))
    ax.legend()
    return ax


def phase_plane(
    core: Callable[..., Any], ax: Axes | None = None, *, inputs: Sequence[float] = (0.0,), params: Sequence[Tensor] = (),
    x: tuple[float, float] = (-1.0, 1.0), y: tuple[float, float] = (-1.0, 1.0), points: int = 201,
    starts: Sequence[tuple[float, float]] = (), steps: int = 200, names: tuple[str, str] | None = None,
) -> Axes:  # fmt: skip
    """The phase plane of a core of two states: where each of them stands still (nullclines), where both go, and how far.

    The core is run for one step on a grid of states, with its inputs held fixed. A nullcline is where one step leaves a
    state as it was, found by contouring the change; they cross at fixed points. States from which the step spikes (an
    output of zeros and ones) are shaded and take no part: there a reset makes the state jump.

    Args:
        core: `core(*inputs, x, y, *params) -> (*outputs, x, y)`, elementwise.
        inputs: the value of each input.
        params: what follows the states.
        x, y: the range of the first and of the second state.
        points: of the grid, along each side.
        starts: states from which trajectories of `steps` steps are drawn; spikes on them are marked.
        names: of the two states; by default the core's own.

    Raises:
        PictureError: the core does not have two states.
    """
    import numpy as np

    from .signature import make_signature

    sig = make_signature(core, len(inputs), 2, len(params))
    ax = _axes(ax)
    xs, ys = np.linspace(*x, points), np.linspace(*y, points)
    grid = [torch.as_tensor(a, dtype=torch.float64) for a in np.meshgrid(xs, ys)]
    spike, change = _one_step(core, inputs, grid, params)
    if spike.any():
        ax.contourf(xs, ys, spike.astype(float), levels=[0.5, 1.5], colors=[ORANGE], alpha=0.12)
    dx, dy = (np.where(spike, np.nan, c) for c in change)
    few = slice(points // 40, None, max(1, points // 20))
    length = np.hypot(dx / (x[1] - x[0]), dy / (y[1] - y[0]))[few, few]
    with np.errstate(invalid="ignore", divide="ignore"):
        u, w = dx[few, few] / length / (x[1] - x[0]), dy[few, few] / length / (y[1] - y[0])
    ax.quiver(xs[few], ys[few], u, w, color=GREY, alpha=0.6, angles="uv", pivot="mid", scale=32, width=0.0025)
    first, second = names or sig.state_names
    for change_of, color, name in ((dx, BLUE, first), (dy, COLORS[2], second)):
        if np.nanmin(change_of) < 0 < np.nanmax(change_of):
            ax.contour(xs, ys, change_of, levels=[0.0], colors=[color], linewidths=1.8)
        ax.plot([], [], color=color, lw=1.8, label=f"{name} stands still")
    for start in starts:
        _trajectory(ax, core, inputs, start, params, steps)
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

    frames, colors = _frames(_array(sequence).astype(float), cmap)
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
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError('flexsn.plot draws with matplotlib, which is not installed: pip install "flexsn[plot]"') from error
    return plt.subplots(layout="constrained")[1]


def _array(values: Any) -> numpy.ndarray:
    import numpy as np

    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype is torch.bfloat16 else values
    return np.asarray(values)


def _rows(values: Any, what: str) -> numpy.ndarray:
    """`[T, n]`."""
    array = _array(values)
    array = array[:, None] if array.ndim == 1 else array
    if array.ndim != 2:
        raise PictureError(
            f"{what} draws one sample, [T, n], and was given {list(array.shape)}",
            hint="Choose a sample and flatten what is left: `spikes[:, 0].flatten(1)`.",
        )
    return array


def _same(array: numpy.ndarray, like: numpy.ndarray, name: str) -> numpy.ndarray:
    if array.shape != like.shape:
        raise PictureError(f"`{name}` is {list(array.shape)} but the membrane is {list(like.shape)}")
    return array


def _level(level: Any, v: numpy.ndarray, name: str) -> numpy.ndarray | None:
    """A line for every trace, `[T, n]`."""
    import numpy as np

    if level is None:
        return None
    try:
        return np.broadcast_to(_array(level).astype(float), v.shape)
    except ValueError:
        raise PictureError(f"`{name}` {list(_array(level).shape)} does not fit a membrane of {list(v.shape)}") from None


def _time_unit(dt: float | None) -> str:
    return "time step" if dt is None else "time (ms)"


def _rate_unit(dt: float | None) -> str:
    return "spikes per step" if dt is None else "rate (Hz)"


def _time_axis(ax: Axes, steps: int, dt: float | None) -> None:
    ax.set_xlim(-0.02 * steps * (dt or 1.0), 1.01 * steps * (dt or 1.0))
    ax.set_xlabel(_time_unit(dt))
    if dt is None:
        _whole_numbers(ax.xaxis)


def _whole_numbers(*axes: Axis) -> None:
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.set_major_locator(MaxNLocator("auto", integer=True))


def _one_step(core, inputs, grid, params) -> tuple[numpy.ndarray, list[numpy.ndarray]]:
    """Where on the grid a step spikes, and by how much it changes both states."""
    fixed = [torch.full_like(grid[0], value) for value in inputs]
    with torch.no_grad():
        returned = core(*fixed, *grid, *params)
    if isinstance(returned, Tensor) or len(returned) < 2:
        raise PictureError("returns fewer values than its two states", core=core_name(core), hint="A phase plane shows two states.")
    outputs, states = returned[:-2], returned[-2:]
    spikes = [_array(y) != 0 for y in outputs if bool(((y == 0) | (y == 1)).all())]
    spike = spikes[0] if spikes else torch.zeros_like(grid[0], dtype=torch.bool).numpy()
    return spike, [_array(new) - _array(old) for new, old in zip(states, grid, strict=True)]


def _trajectory(ax: Axes, core, inputs, start: tuple[float, float], params, steps: int) -> None:
    import numpy as np

    held = [torch.full((steps, 1), float(value), dtype=torch.float64) for value in inputs]
    first = [torch.full((1,), float(value), dtype=torch.float64) for value in start]
    with torch.no_grad():
        outputs, states = scan(core, held, first, params, store_state_seqs=True, backend="torch")
    path = np.stack([np.append(s0, _array(s)) for s0, s in zip(start, states, strict=True)])
    ax.plot(*path, color=INK, lw=0.9, marker=".", ms=2.5, zorder=3)
    ax.plot(*path[:, :1], "o", color=INK, ms=5, zorder=3)
    fired = _array(outputs[0])[:, 0] if outputs else np.zeros(steps)
    if np.isin(fired, (0, 1)).all() and fired.any():
        ax.plot(*path[:, :-1][:, fired == 1], "*", color=ORANGE, ms=9, mew=0, zorder=4)


def _frames(array: numpy.ndarray, cmap: str) -> tuple[numpy.ndarray, dict[str, Any]]:
    """`[T, H, W]` or, for events, `[T, H, W, 3]`; and how `imshow` colors them."""
    import numpy as np

    if array.ndim == 3:
        return array, {"cmap": cmap, "vmin": float(array.min()), "vmax": float(array.max())}
    if array.ndim != 4 or array.shape[1] != 2:
        raise PictureError(f"animate draws [T, H, W] or [T, 2, H, W], not {list(array.shape)}", hint="Choose a sample: `frames[:, 0]`.")
    weight = (array / (array.max() or 1.0))[..., None]
    inks = [1.0 - np.array([int(c[i : i + 2], 16) for i in (1, 3, 5)]) / 255 for c in (BLUE, ORANGE)]
    return np.clip(1.0 - weight[:, 0] * inks[0] - weight[:, 1] * inks[1], 0.0, 1.0), {}
