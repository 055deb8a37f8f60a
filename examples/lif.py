"""The smallest use of flexsn: a leaky integrate-and-fire neuron, run and differentiated over 100 steps."""

import torch

import flexsn


def lif(x, v):
    h = v + (x - v) / 2.0
    s = flexsn.surrogate.atan(h - 1.0)
    return s, h * (1.0 - s)


if __name__ == "__main__":
    neuron = flexsn.FlexSN(lif, num_states=1)
    x = (2 * torch.rand(100, 32, 512)).requires_grad_()  # [T, batch, neurons]
    spikes = neuron(x)
    spikes.mean().backward()
    print(f"{spikes.mean():.3f} spikes per neuron and step; |dL/dx| = {x.grad.norm():.3e}")
    neuron.reset()
