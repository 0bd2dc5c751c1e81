"""Choose every operation's layouts, and insert the collectives between operations."""
