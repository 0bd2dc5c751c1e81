"""A plan's cost: time, memory, and why, as text, as a page, and as a trace."""
