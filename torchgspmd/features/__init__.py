"""Features: each folder adds rows to the tables of the core, which knows none of them by name."""
