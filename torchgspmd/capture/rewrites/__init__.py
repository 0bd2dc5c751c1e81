"""Functions that a trace calls in place of torch's."""
