"""torchgspmd: GSPMD (arXiv 2105.04663) for PyTorch. Write a model for one device, mark a few
tensors, run it on a mesh.
"""

from .comm.collective import Collective
from .comm.hardware import Hardware
from .compiler.api import Plan, plan
from .errors import ShardingError
from .layout.annotate import annotate, mark_sharding
from .layout.layout_rules import Layout
from .layout.mesh import Mesh
from .layout.spec_notation import UNCONSTRAINED
from .model_api import collectives, moe, stack
from .model_api import pipelined_blocks as pipeline
from .model_api.manual import manual
from .model_api.train_step import train_step
from .rules.custom import rule
from .runtime.full_state import full_state_dict
from .runtime.parallelize import parallelize, shard_batch
from .shard_spec import ShardSpec
from .tools import evaluation
from .tools.calibrate import calibrate
from .tools.compare_with_xla import compare_with_xla
from .tools.doctor import doctor
from .tools.report.visualize import visualize
from .tools.suggest import suggest

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
