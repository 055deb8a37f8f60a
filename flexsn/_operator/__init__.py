"""A program as a PyTorch operator: calls, autograd, dispatch, the eager loop, DTensor, streaming."""
