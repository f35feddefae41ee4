"""The first and the last visible key of every row of a mask, in one pass over it."""
