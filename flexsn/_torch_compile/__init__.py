"""What `torch.compile`, export and Inductor see of a call."""
