"""Unknown sizes: dimensions whose size only a run knows, as that of a selection has."""
