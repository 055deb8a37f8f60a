"""From a plan to the source text of a kernel, per language."""
