"""Gradients by recomputing the attention of a few rows at a time."""
