"""Two attentions on different keys as one."""
