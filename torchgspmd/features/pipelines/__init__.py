"""Pipelines: each device runs its stages, one piece of a microbatch at a time."""
