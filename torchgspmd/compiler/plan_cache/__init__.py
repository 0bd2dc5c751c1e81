"""Plans as text: rank 0 plans, the other ranks and later starts of the job receive the text."""
