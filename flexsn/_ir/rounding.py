"""Where eager PyTorch rounds differently by device: the one place that says so."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rounding:
    """How eager ops of one kind of device round, where devices differ.

    Attributes:
        narrow_numbers: sums of 16-bit floats first round a Python number, `alpha` too, to that dtype.
        reciprocals: dividing by a number multiplies by its rounded reciprocal.
        late_factors: `addcmul` and `addcdiv` form the product or quotient first, then multiply by `value` and add in one rounding.
        rounds_powers: `x**2` and `x**3` of float16 round every product, as those of bfloat16 do everywhere.
        cancels_in_gelu: `gelu` takes `1 + erf(x)`, which loses digits where it is small, and not `erfc(-x)`.
        contracts: formulas that are one kernel round a product and a sum once, as compilers for GPUs do.
    """

    narrow_numbers: bool
    reciprocals: bool
    late_factors: bool
    rounds_powers: bool
    cancels_in_gelu: bool
    contracts: bool


CPU = Rounding(narrow_numbers=True, reciprocals=False, late_factors=False, rounds_powers=False, cancels_in_gelu=True, contracts=False)
CUDA = Rounding(narrow_numbers=False, reciprocals=True, late_factors=True, rounds_powers=True, cancels_in_gelu=False, contracts=True)


def rounding_of(device: torch.device) -> Rounding:
    """The rules of a device; tensors without storage (`meta`) follow those of the CPU."""
    return CUDA if device.type == "cuda" else CPU
