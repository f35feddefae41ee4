"""Flash-attention forward in plain Triton: tiles of queries over tiles of keys."""
