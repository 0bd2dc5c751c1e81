"""Tools around a plan. The library below imports none of them."""
