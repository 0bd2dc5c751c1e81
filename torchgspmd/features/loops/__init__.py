"""Loops: their bodies as programs, and the values that cross their iterations."""
