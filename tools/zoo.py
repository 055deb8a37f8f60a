"""The tables of docs/neurons.md and docs/surrogates.md, and the plot of the latter, from the code.

Usage: python tools/zoo.py [--write]
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import torch

import flexsn
from flexsn import surrogate

DOCS = Path(__file__).parent.parent / "docs"
FAMILIES = {
    "Integrate and fire": ["IF", "LIF", "ParametricLIF", "KLIF", "GatedLIF", "LeakyIntegrator"],
    "With a synapse": ["CubaLIF", "CubaLI"],
    "Adaptive and refractory": ["ALIF", "AdLIF", "RefractoryLIF"],
    "Non-linear": ["QuadraticIF", "ExponentialIF", "AdEx", "Izhikevich"],
    "Oscillating, compartments, conductances": ["ResonateAndFire", "TwoCompartmentLIF", "HodgkinHuxley"],
}
PEERS = {  # name here: (SpikingJelly, snnTorch); after a colon: what must be given here to be the same
    "atan": ("`ATan()`", "`atan()`"),
    "sigmoid": ("`Sigmoid()`", "`sigmoid()`: `alpha=25`"),
    "fast_sigmoid": ("", "`fast_sigmoid()`"),
    "super_spike": ("`SuperSpike(a)`: `beta=1, height=a`", ""),
    "soft_sign": ("`SoftSign()`", ""),
    "piecewise_linear": ("", ""),
    "piecewise_quadratic": ("`PiecewiseQuadratic()`", ""),
    "piecewise_exp": ("`PiecewiseExp()`", ""),
    "gaussian": ("", ""),
    "erf": ("`Erf()`", ""),
    "rect": ("`Rect()`", ""),
    "nonzero_sign_log_abs": ("`NonzeroSignLogAbs()`", ""),
    "q_pseudo_spike": ("`QPseudoSpike()`", ""),
    "fake_numerical_gradient": ("`FakeNumericalGradient()`", ""),
    "piecewise_leaky_relu": ("`PiecewiseLeakyReLU()`", ""),
    "leaky_k_relu": ("`LeakyKReLU()`", ""),
    "LSO": ("", "`LSO()`"),
    "heaviside": ("", "`heaviside()`"),
    "log_tailed_relu": ("`LogTailedReLU()`", ""),
    "s2nn": ("`S2NN()`", ""),
    "spike_rate_escape": ("", "`spike_rate_escape()`"),
    "SFS": ("", "`SFS()`"),
    "triangular": ("", "`triangular()`"),
    "squarewave_fourier_series": ("`SquarewaveFourierSeries()`", ""),
    "straight_through": ("`DeterministicPass()`", "`straight_through_estimator()`"),
    "multi_level_spike_count": ("`MultiLevelSpikeCount(n)`", ""),
    "custom_surrogate": ("", "`custom_surrogate(f)`"),
    "poisson_pass": ("`PoissonPass()`", ""),
    "SSO": ("", "`SSO()`"),
}
OPTIONS = [n for n, p in inspect.signature(flexsn.neurons.Neuron.__init__).parameters.items() if p.kind is p.KEYWORD_ONLY]
CURVES = [n for n in PEERS if n != "custom_surrogate"]


def paragraphs(thing) -> list[str]:
    return [re.sub(r"\s+", " ", p) for p in (inspect.getdoc(thing) or "").split("\n\n")]


def shown(value) -> str:
    return getattr(value, "__name__", None) or repr(value)


def neuron_tables() -> str:
    text = []
    for family, names in FAMILIES.items():
        text.append(f"\n### {family}\n")
        for name in names:
            cls = getattr(flexsn, name)
            core = cls.step
            operands = [p for p, v in inspect.signature(core).parameters.items() if v.default is v.empty]
            taken = [p for p in inspect.signature(cls).parameters.values() if p.name not in OPTIONS]
            arguments = ", ".join(f"`{p.name}={shown(p.default)}`" for p in taken)
            text.append(f"**`flexsn.{name}`**, core `flexsn.neurons.{core.__name__}({', '.join(operands)}, ...)`\n")
            text += [f"{p}\n" for p in paragraphs(core) if not p.startswith("Args:")]
            notes = " ".join(p.removeprefix("Args: ") for thing in (core, cls) for p in paragraphs(thing) if p.startswith("Args:"))
            text.append(f"Arguments: {arguments}." + (f" Here {notes}" if notes else "") + "\n")
    return "\n".join(text)


def surrogate_table() -> str:
    rows = ["| name and defaults | gradient | SpikingJelly | snnTorch (`inclusive=False`) |", "| --- | --- | --- | --- |"]
    for name, peers in PEERS.items():
        spike = getattr(surrogate, name)
        given = [p for p in inspect.signature(spike).parameters.values() if p.name not in ("x", "inclusive")]
        settings = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in given)
        first = paragraphs(spike)[0].replace("|", "\\|")
        rows.append(f"| `{name}({settings})` | {first} | {peers[0]} | {peers[1]} |")
    return "\n".join(rows) + "\n"


def fill(page: str, parts: dict[str, str]) -> str:
    """The page with what stands between its markers replaced."""
    for name, content in parts.items():
        marker = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
        assert marker.search(page), name
        page = marker.sub(lambda m, c=content: m.group(1) + c + m.group(2), page)  # type: ignore[misc]  # a lambda
    return page


def pages() -> dict[Path, str]:
    """Every page as it should be."""
    parts = {"neurons.md": {"zoo": neuron_tables()}, "surrogates.md": {"surrogates": surrogate_table()}}
    return {DOCS / name: fill((DOCS / name).read_text(), found) for name, found in parts.items()}


def plot(path: Path) -> None:
    """Every gradient with its default settings."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = 5
    rows = -(-len(CURVES) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(2.5 * columns, 1.7 * rows), sharex=True, layout="constrained")
    x = torch.linspace(-4.0, 4.0, 3201, dtype=torch.float64, requires_grad=True)
    for axis, name in zip(axes.flat, CURVES, strict=False):
        noise = [torch.rand(x.shape, generator=torch.Generator().manual_seed(0))] if name in ("poisson_pass", "SSO") else []
        (gradient,) = torch.autograd.grad(getattr(surrogate, name)(x, *noise).sum(), x)
        axis.axvline(0.0, color="0.8", linewidth=0.8)
        axis.axhline(0.0, color="0.8", linewidth=0.8)
        axis.plot(x.detach(), gradient, color="C0", linewidth=1.5)
        axis.set_title(name, fontsize=8)
        axis.tick_params(labelsize=7)
    for axis in axes.flat[len(CURVES) :]:
        axis.remove()
    figure.supxlabel("distance to threshold", fontsize=9)
    figure.supylabel("gradient", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(write: bool) -> None:
    for path, page in pages().items():
        print(f"{path.name}: {'up to date' if path.read_text() == page else 'changed'}")
        if write:
            path.write_text(page)
    if write:
        plot(DOCS / "img" / "surrogate_gradients.png")


if __name__ == "__main__":
    main("--write" in sys.argv[1:])
