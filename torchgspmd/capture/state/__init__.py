"""What a program reads, keeps and changes besides its arguments."""
