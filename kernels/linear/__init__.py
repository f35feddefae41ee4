"""Linear layers of one row, with what stands around them, in one launch."""
