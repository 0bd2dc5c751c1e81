"""Loops: bodies of loops as programs of their own, and values that cross their iterations."""
