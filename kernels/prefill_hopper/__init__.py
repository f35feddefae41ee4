"""triton.prefill_hopper: attention over many queries for compute capability 9.0, written in Gluon."""
