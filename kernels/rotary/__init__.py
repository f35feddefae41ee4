"""Rotary position embeddings in one launch."""
