"""attnpatch."""
