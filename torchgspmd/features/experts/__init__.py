"""Experts: products of groups of rows, each where the matrix of its group is."""
