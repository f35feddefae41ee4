"""Jitted pieces that the Triton kernels share, and what their launchers share on the host."""
