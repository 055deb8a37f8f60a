"""The command line: `flexsn explain | bench | doctor | cache`, also as `python -m flexsn`."""

from .main import main

__all__ = ["main"]
