"""Recurrences: scans, and loops whose carry is affine, along a sharded sequence."""
