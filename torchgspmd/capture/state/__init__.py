"""State that a program reads, keeps and changes besides its arguments."""
