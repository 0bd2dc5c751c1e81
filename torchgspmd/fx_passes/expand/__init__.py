"""Decompose operations without a rule; split fused operations, products and mesh axes."""
