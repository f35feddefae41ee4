"""Which backend torch's ``scaled_dot_product_attention`` takes here: what ``attnpatch doctor --sdpa`` prints.

``cases`` has the calls that are tried and what one can change in them, ``choice`` runs them, ``show`` prints them.
"""
