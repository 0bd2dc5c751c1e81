"""Shared by the examples: the command line, the training loop, checkpoints, the output."""
