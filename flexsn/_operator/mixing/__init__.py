"""Steps that mix neurons: what mixes is PyTorch's, or a loop's of its own, and the rest is the step of a kernel."""
