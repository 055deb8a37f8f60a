"""Private names of PyTorch, one file per feature."""
