"""Meshes, axes, layouts of tensors, and the marks of users."""
