"""Functions that a trace calls in place of functions of torch."""
