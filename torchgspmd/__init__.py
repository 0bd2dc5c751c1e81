"""torchgspmd: GSPMD (arXiv 2105.04663) for PyTorch. Write a model for one device, mark a few
tensors, run it on a mesh.
"""

from . import collectives, evaluation, moe
from .annotate import annotate, mark_sharding
from .api import Plan, plan
from .blocks import pipeline, stack
from .calibrate import calibrate
from .comm.collective import Collective
from .compare_with_xla import compare_with_xla
from .doctor import doctor
from .errors import ShardingError
from .full_state import full_state_dict
from .hardware import Hardware
from .layout_rules import Layout
from .manual import manual
from .mesh import Mesh
from .report.visualize import visualize
from .rules.custom import rule
from .runtime.parallelize import parallelize, shard_batch
from .runtime.train_step import train_step
from .shard_spec import ShardSpec
from .spec_notation import UNCONSTRAINED
from .suggest import suggest

__all__ = [
    "UNCONSTRAINED",
    "Collective",
    "Hardware",
    "Layout",
    "Mesh",
    "Plan",
    "ShardSpec",
    "ShardingError",
    "annotate",
    "calibrate",
    "collectives",
    "compare_with_xla",
    "doctor",
    "evaluation",
    "full_state_dict",
    "manual",
    "mark_sharding",
    "moe",
    "parallelize",
    "pipeline",
    "plan",
    "rule",
    "shard_batch",
    "stack",
    "suggest",
    "train_step",
    "visualize",
]
