"""From a core to a recorded step: signature, tracing, decompositions, the vector-Jacobian product."""
