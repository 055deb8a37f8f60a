__version__ = "0.1.0"
TESTED_TORCH = "2.11", "2.14"  # the oldest and the newest PyTorch that the tests run with
