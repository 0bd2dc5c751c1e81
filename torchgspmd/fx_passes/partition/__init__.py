"""Choose the layouts of every operation, and insert the collectives between operations."""
