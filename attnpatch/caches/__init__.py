"""Caches for transformers' ``generate`` and models. ``pages`` needs neither torch nor transformers."""
