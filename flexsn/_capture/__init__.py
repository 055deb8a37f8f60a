"""From a core to a recorded step: signature, captured values, tracing, the vector-Jacobian product."""
