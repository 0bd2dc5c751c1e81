"""One device's program."""
