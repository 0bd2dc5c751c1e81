"""When a program communicates, and which values it keeps in memory."""
