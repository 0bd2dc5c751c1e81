"""Propagate the layouts of marks to every value."""
