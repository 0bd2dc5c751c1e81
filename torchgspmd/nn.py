"""The names that a model is written with: `gspmd.nn.stack`, also `gspmd.stack`."""

# "x as x" is a re-export for type checkers.
from .model_api import collectives as collectives
from .model_api import moe as moe
from .model_api.manual import manual as manual
from .model_api.pipeline_model import pipeline_model as pipeline_model
from .model_api.pipeline_of_blocks import pipeline as pipeline
from .model_api.stack import stack as stack
from .model_api.train_step import train_step as train_step

__all__ = ["collectives", "manual", "moe", "pipeline", "pipeline_model", "stack", "train_step"]
