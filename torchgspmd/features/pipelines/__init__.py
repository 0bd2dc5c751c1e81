"""Pipelines: stages on devices, each at its piece of a microbatch at a time."""
