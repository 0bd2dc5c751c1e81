"""Custom operations that captured graphs and programs use beside PyTorch's."""
