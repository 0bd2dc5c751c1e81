"""Runtime: modules that compile and run programs on a mesh."""
