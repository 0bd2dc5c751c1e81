"""torchgspmd: GSPMD (arXiv 2105.04663) for PyTorch. Write a model for one device, mark a few
tensors, run it on a mesh.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .comm.termination import print_errors_once
from .compat import moved_modules
from .compiler import add_tool
from .errors import ShardingError
from .layout.layout_rules import Layout
from .layout.mesh import Mesh
from .layout.spec_notation import UNCONSTRAINED
from .shard_spec import ShardSpec

if TYPE_CHECKING:
    # The names of _LATER, for type checkers alone: nothing is loaded here.
    from .comm.collective import Collective
    from .comm.hardware import Hardware
    from .compiler.api import Plan, plan
    from .layout.annotate import annotate
    from .layout.family_marks import marks as marks
    from .layout.mark import mark_sharding
    from .layout.mark import reshard as reshard
    from .nn import collectives, manual, moe, pipeline, stack, train_step
    from .nn import pipeline_model as pipeline_model
    from .rules.custom import rule
    from .runtime.batch_sampler import BatchSampler as BatchSampler
    from .runtime.checkpoint import load, save
    from .runtime.full_state import full_state_dict
    from .runtime.load_full_state import load_full_state_dict
    from .runtime.load_safetensors import load_safetensors as load_safetensors
    from .runtime.parallelize import parallelize, shard_batch
    from .runtime.transfer import transfer as transfer
    from .tools import calibrate, compare_with_xla, doctor, evaluation, suggest, visualize
    from .tools.compare_values import compare as compare
    from .tools.debug import debug as debug
    from .tools.elastic import elastic as elastic
    from .tools.launch import launch as launch
    from .tools.name_frames import frame_names as frame_names
    from .tools.name_frames import name_frames as name_frames
    from .tools.step_log import StepLog as StepLog

__version__ = "0.9.0"  # pyproject.toml reads it from here, without an import

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
    "load",
    "load_full_state_dict",
    "manual",
    "mark_sharding",
    "moe",
    "parallelize",
    "pipeline",
    "plan",
    "rule",
    "save",
    "shard_batch",
    "stack",
    "suggest",
    "train_step",
    "visualize",
]

_LATER = {  # Names that load their folder, or file, when they are first asked for.
    "Collective": "comm.collective",
    "Hardware": "comm.hardware",
    **dict.fromkeys(["Plan", "plan"], "compiler.api"),
    "annotate": "layout.annotate",
    "marks": "layout.family_marks",
    **dict.fromkeys(["mark_sharding", "reshard"], "layout.mark"),
    "rule": "rules.custom",
    "full_state_dict": "runtime.full_state",
    **dict.fromkeys(["parallelize", "shard_batch"], "runtime.parallelize"),
    "BatchSampler": "runtime.batch_sampler",
    **dict.fromkeys(["load", "save"], "runtime.checkpoint"),
    "load_full_state_dict": "runtime.load_full_state",
    "load_safetensors": "runtime.load_safetensors",
    "transfer": "runtime.transfer",
    **dict.fromkeys(
        ["collectives", "manual", "moe", "pipeline", "pipeline_model", "stack", "train_step"], "nn"
    ),
    **dict.fromkeys(
        ["calibrate", "compare_with_xla", "doctor", "evaluation", "suggest", "visualize"], "tools"
    ),
    "StepLog": "tools.step_log",
    "compare": "tools.compare_values",
    "debug": "tools.debug",
    "elastic": "tools.elastic",
    "launch": "tools.launch",
    **dict.fromkeys(["frame_names", "name_frames"], "tools.name_frames"),
}


def __getattr__(name: str) -> Any:
    # A submodule is no attribute of its package before it is imported.
    if name in ("nn", "tools"):
        return import_module(f".{name}", __name__)
    if name not in _LATER:
        raise AttributeError(f"module 'torchgspmd' has no attribute '{name}'")
    # The next access finds the name without this function.
    value = globals()[name] = getattr(import_module(f".{_LATER[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "nn", "tools"])


NAMES = tuple(dict.fromkeys([*__all__, *_LATER]))  # all public names; dir() shows the common ones


moved_modules.install(__name__)
print_errors_once()
add_tool(lambda: import_module(".tools.report.plan_views", __name__).PlanViews)
