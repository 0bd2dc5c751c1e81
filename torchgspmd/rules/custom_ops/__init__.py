"""Custom operations that captured graphs and programs use beside those of PyTorch."""
