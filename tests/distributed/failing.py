"""Checks that fail, for test_ranks.py. They are no tests."""

import os
import time

import torch.distributed as dist
from ranks import distributed


@distributed()
def fails_on_rank_1(mesh):
    if dist.get_rank() == 1:
        raise ValueError("only here")
    dist.barrier()


@distributed(timeout=5)
def hangs_on_rank_1(mesh):
    time.sleep(100 * dist.get_rank())


@distributed()
def ends_on_rank_1(mesh):
    print("a last word", flush=True)
    if dist.get_rank() == 1:
        os._exit(3)
