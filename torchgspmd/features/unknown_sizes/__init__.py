"""Unknown sizes: dimensions whose size only a run knows, such as a selection's."""
