"""What `to_nir` gives, `nir.read` takes: every graph is read back, and what NIR cannot read is rewritten or refused by name."""

import pytest
import torch
from loaded_peers import nir
from torch import nn

import flexsn
from flexsn import Delay, PerStep
from flexsn.errors import InterchangeError
from flexsn.interchange import Scale, SumPool2d, Threshold

T, B = 8, 2


def conv2d(*args, **options):
    return PerStep(nn.Conv2d(4, *args, **options), 3)


def conv1d(*args, **options):
    return PerStep(nn.Conv1d(4, *args, **options), 2)


IMAGES, LINES, VECTORS = (4, 9, 8), (4, 9), (8,)
LAYERS = {
    "groups": (lambda: conv2d(8, 3, groups=2), IMAGES),
    "depthwise": (lambda: conv2d(4, 3, groups=4, stride=2, padding=1, bias=False), IMAGES),
    "depthwise, two each": (lambda: conv2d(8, 3, groups=4), IMAGES),
    "groups 1d": (lambda: conv1d(8, 3, groups=4, dilation=2), LINES),
    "1 x 3": (lambda: conv2d(8, (1, 3), dilation=(1, 2), stride=2), IMAGES),
    "5 x 3, groups": (lambda: conv2d(8, (5, 3), padding="valid", groups=2), IMAGES),
    "4 x 2": (lambda: conv2d(3, (4, 2), padding=(1, 0), stride=(1, 2), dilation=(2, 1)), IMAGES),
    "1 x 3, same": (lambda: conv2d(8, (1, 3), padding="same"), IMAGES),
    "same 1d": (lambda: conv1d(8, 3, padding="same"), LINES),
    "pool": (lambda: PerStep(nn.AvgPool2d((3, 2), stride=(1, 2), padding=(1, 0)), 3), IMAGES),
    "sums": (lambda: PerStep(SumPool2d((1, 2)), 3), IMAGES),
    "flatten some": (lambda: nn.Flatten(2, 3), IMAGES),
    "scale": (lambda: Scale(torch.rand(9, 8)), IMAGES),
    "threshold": (lambda: Threshold(torch.tensor(0.4), flexsn.surrogate.atan), IMAGES),
    "delay": (lambda: Delay(3), VECTORS),
    "linear": (lambda: nn.Linear(8, 5, bias=False), VECTORS),
    "identity": (nn.Identity, VECTORS),
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_graph_is_readable_and_computes_the_same(name, tmp_path):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    net, x = nn.Sequential(make(), flexsn.IF(v_threshold=0.3, backend="torch")), 3.0 * torch.rand(T, B, *shape)
    nir.write(tmp_path / "net.nir", flexsn.to_nir(net, x))
    again = flexsn.from_nir(nir.read(tmp_path / "net.nir"), backend="torch")
    want = net(x)
    torch.testing.assert_close(again(x), want)
    assert want.any() and not want.all()


def test_a_kernel_that_has_no_square_is_refused():
    with pytest.raises(InterchangeError, match=r"`0` \(Conv2d\): has a kernel of 2 x 3, which `nir.read` takes for a square one"):
        flexsn.to_nir(nn.Sequential(conv2d(8, (2, 3))), torch.rand(T, B, *IMAGES))


class Slashed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"in/linear": nn.Linear(8, 5), "in/if": flexsn.IF()})

    def forward(self, x):
        return self.layers["in/if"](self.layers["in/linear"](x))


def test_names_that_would_be_folders_of_the_file():
    assert list(flexsn.to_nir(Slashed(), torch.rand(T, B, 8)).nodes) == ["input", "layers.in_linear", "layers.in_if", "output"]


def test_what_nir_refuses_is_said_before_a_file_is_written(monkeypatch):
    def refuse(file):
        raise ValueError("type mismatch: a -> b")

    monkeypatch.setattr(nir, "read", refuse)
    with pytest.raises(InterchangeError, match=r"`nir.read` would refuse the graph: ValueError: type mismatch: a -> b"):
        flexsn.to_nir(flexsn.IF(), torch.rand(T, B, 4))


WITHOUT_BATCH = {
    "vectors": (lambda: nn.Sequential(nn.Linear(8, 5), flexsn.IF()), VECTORS, r"shape \[8, 8\], which leaves no dims for one step"),
    "a neuron": (flexsn.IF, VECTORS, r"shape \[8, 8\], which leaves no dims for one step[\s\S]*sample_input.unsqueeze\(1\)"),
    "images": (lambda: nn.Sequential(conv2d(3, 3), flexsn.IF()), IMAGES, r"takes steps of 3 dims beside the batch[\s\S]*\[9, 8\]"),
    "lines": (lambda: nn.Sequential(conv1d(3, 3), flexsn.IF()), LINES, r"takes steps of 2 dims beside the batch[\s\S]*\[9\]"),
    "a pool": (lambda: nn.Sequential(PerStep(nn.AvgPool2d(2), 3)), IMAGES, r"takes steps of 3 dims beside the batch[\s\S]*unsqueeze\(1\)"),
    "neurons": (lambda: flexsn.LIF(tau=torch.full(IMAGES, 2.0)), IMAGES, r"`tau` has shape \[4, 9, 8\], which is not that of one step \[9, 8\]"),
    "a scale": (lambda: nn.Sequential(Scale(torch.ones(IMAGES))), IMAGES, r"`scale` has shape \[4, 9, 8\][\s\S]*\[T, B, \*shape\]"),
    "delays": (lambda: nn.Sequential(Delay(torch.ones(IMAGES))), IMAGES, r"`steps` has shape \[4, 9, 8\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_BATCH)
def test_a_sample_without_a_batch_is_told_so(name):
    make, shape, message = WITHOUT_BATCH[name]
    with pytest.raises(InterchangeError, match=message):
        flexsn.to_nir(make(), torch.rand(T, *shape))
    flexsn.to_nir(make(), torch.rand(T, 1, *shape))


def test_a_single_step_without_a_batch_is_told_so():
    with pytest.raises(InterchangeError, match=r"shape \[8\], which leaves no dims for one step: it must be `\[B, \*shape\]`"):
        flexsn.to_nir(nn.Sequential(nn.Linear(8, 5), flexsn.IF(step_mode="s")), torch.rand(8))
