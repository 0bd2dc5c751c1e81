"""Experts: products of row groups, each on the device that has the group's matrix."""
