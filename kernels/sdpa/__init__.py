"""torch's scaled_dot_product_attention with the mask lifted and no repeated K/V."""
