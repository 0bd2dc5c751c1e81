"""Propagate marked layouts to every value."""
