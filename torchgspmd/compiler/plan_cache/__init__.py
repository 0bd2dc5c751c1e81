"""Plans as text: rank 0 plans, other ranks and later starts receive the text."""
