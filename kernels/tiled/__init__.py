"""Online softmax over tiles in plain torch: every mask, softcap and dtype, on any device."""
