"""New keys and values into caches."""
