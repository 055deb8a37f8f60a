"""The closed set of ops, the graph over it, and the lowering of ATen to it."""
