"""Run a captured and annotated graph on torch_xla, whose own GSPMD partitions it.

torch_xla is an optional package: only functions import it. Facts about it hold for torch_xla 2.9.
"""
