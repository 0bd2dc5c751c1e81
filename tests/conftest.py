"""Every program that a test plans is verified."""
import os

os.environ.setdefault("TORCHGSPMD_CHECK", "1")
