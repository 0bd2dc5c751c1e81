"""A layout for every value, from the marks."""
