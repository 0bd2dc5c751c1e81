"""What a rank runs: functional collectives, kernels, memory."""
