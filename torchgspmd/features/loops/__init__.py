"""Loops: bodies of loops as programs of their own, and what crosses their iterations."""
