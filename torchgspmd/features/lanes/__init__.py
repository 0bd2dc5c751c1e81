"""Lanes: alike, independent regions of a program, computed as one with a further dimension."""
