"""The rows that loops add to the tables of the core: PIPELINE has their passes."""
