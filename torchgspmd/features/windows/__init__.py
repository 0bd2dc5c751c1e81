"""Windows: convolutions, pooling, interpolation, padding by content (section 4 of the paper)."""
