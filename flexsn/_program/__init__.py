"""Captured programs: compiled, cached and serialised."""
