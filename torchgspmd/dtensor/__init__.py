"""Parameters as DTensors, and what torch's DTensor does not do with them."""
