"""What a plan will cost: time, memory, and why, as text, as a page, and as a trace."""
