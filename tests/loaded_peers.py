"""The libraries that models come from and go to, imported without their own warnings (Norse 1.1 uses `torch.jit.script`)."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import nir
    import norse.torch as norse
    import snntorch as snn
    from snntorch import surrogate as snn_surrogate
    from snntorch import utils as snn_utils
    from spikingjelly.activation_based import base, functional, layer, neuron, surrogate

__all__ = ["base", "functional", "layer", "neuron", "nir", "norse", "snn", "snn_surrogate", "snn_utils", "surrogate"]
