"""Attention: one operation, sharded along batch, heads, queries and keys."""
