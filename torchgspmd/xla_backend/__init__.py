"""A captured, annotated, not partitioned graph on torch-xla, whose own GSPMD partitions it.

torch_xla is an optional package, imported inside of functions only. Facts about it are those of
torch_xla 2.9.
"""
