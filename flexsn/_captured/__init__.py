"""What a core captures, and the core on stand-ins of it: found along the names in its code, guarded, owned by modules, copied."""
