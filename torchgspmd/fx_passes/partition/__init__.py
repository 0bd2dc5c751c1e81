"""Which factors of each operation are sharded, and the collectives between operations."""
