"""From source text to a loaded kernel: compilers, caches, memory, launches."""
