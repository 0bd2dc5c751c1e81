"""The cost of a plan: time, memory, and why, as text, as a page, and as a trace."""
