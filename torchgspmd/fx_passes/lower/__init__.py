"""The program of a rank: functional collectives, kernels, memory."""
