"""A rank's program: functional collectives, kernels, memory."""
