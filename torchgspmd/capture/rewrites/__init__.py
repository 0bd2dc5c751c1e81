"""What is traced in the place of functions of torch."""
