"""Capture: a module or function becomes one graph.

`capture` runs it on fake tensors. The other files have the replacements for calls in the trace.
"""

from .argument_sizes import ArgumentSizes, Dims, sizes_of
from .captured import (
    ARGUMENT,
    BUFFER,
    GRADIENT,
    MUTATION,
    OBSERVED,
    OUTPUT,
    PARAMETER,
    TANGENT,
    UNKNOWN,
    Captured,
    Input,
    Output,
)
from .eager_kernels import refused_operation
from .pinned_sizes import capture_sized, cotangents_of
from .rewrites.loop_trace import unrolling
from .state.object_trees import opened
from .state.source import Source
from .state.state_inputs import State, Varying
from .state.writes import tensor_sources
from .trace import capture, leaf_names
from .trace_context import is_capturing, not_compiled
from .traced_program import check_dtypes
from .traced_values import is_transforming
from .unsupported import check_module
