"""Modules that run programs."""
