"""Meshes, axes, tensor layouts, and users' marks."""
