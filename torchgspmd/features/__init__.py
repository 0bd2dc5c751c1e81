"""Features: each folder adds rows to the core's tables; the core knows none by name."""
