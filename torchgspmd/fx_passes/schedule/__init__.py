"""When a program communicates, and what it keeps in memory."""
