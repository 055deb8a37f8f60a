"""Triton: how kernels are built and launched, their tiles, and the functions that they call."""
