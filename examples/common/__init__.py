"""What the examples share: the command line, the training loop, checkpoints, and what is printed."""
