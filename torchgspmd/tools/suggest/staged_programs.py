"""Layers in stages: a search's programs on meshes with the axis STAGE.

A pipeline's layers are a loop, so a program has them all, and no number is extrapolated. Its
weights are stacked: layers.0.up [h, m], layers.1.up, ... are layers.block.up [layers, h, m].
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...capture import Captured, capture
from ...compiler.options import Options
from ...errors import ShardingError
from ...layout.layout_rules import Layout, Unmarked, bound
from ...layout.mesh import Mesh
from ...model_api.pipeline_model import pipeline_model
from ...shard_spec import ShardSpec
from .layers import Layers
from .proposal import STAGE, Group, Savings, groups_of


@dataclass
class StagedPrograms:
    """The programs of a model whose layers are in stages, captured once for each mesh.

    args, kwargs: a call's. captures: or the error of one that cannot be captured.
    """

    model: nn.Module
    layers: Layers
    args: tuple[object, ...]
    kwargs: dict[str, object]
    options: Options
    captures: dict[tuple[Mesh, bool, int], Captured | Exception] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The path of the layers that are in stages: of the first of like lists."""
        return next(iter(self.layers.lists), "")

    @property
    def may_exist(self) -> bool:
        """Whether layers are alike, and have a name."""
        return self.layers.alike and bool(self.path)

    def program(self, mesh: Mesh, savings: Savings) -> Captured:
        """Return the program on a mesh.

        Raises ShardingError if the layers cannot be stages.
        """
        key = mesh, bool(savings.recomputed), savings.microbatches
        if key not in self.captures:
            try:
                self.captures[key] = self._capture(*key)
            except Exception as error:  # whatever a model's code raises
                self.captures[key] = error
        found = self.captures[key]
        if isinstance(found, Exception):
            raise ShardingError(f"the layers cannot be in stages: {found}")
        return found

    def _capture(self, mesh: Mesh, recompute: bool, microbatches: int) -> Captured:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        # A copy without values, in which tensors stay tied, as each has one.
        copied = copy.deepcopy(self.model, {id(t): _without_values(t) for t in tensors})
        options = {"microbatches": microbatches, "schedule": "1f1b", "recompute": recompute}
        staged = pipeline_model(copied, self.path, mesh, STAGE, **options)
        with bound(Unmarked(Layout({}), mesh, axis=STAGE)):
            return capture(
                staged,
                self.args,
                self.kwargs,
                mesh,
                grad=True,
                param_dtype=self.options.param_dtype,
            )

    def groups(self, program: Captured, known: Mapping[str, Group]) -> dict[str, Group]:
        """Return each weight's group; stacked ones have that of the first layer's.

        known: the groups of the program without stages, by name.
        """
        stacked = f"{self.path}.block."
        first = f"{self.path}.0."
        return {
            name: known[first + name.removeprefix(stacked) if name.startswith(stacked) else name]
            for name in groups_of(program)
        }


def _without_values(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def with_stage(spec: ShardSpec | None, shape: Sequence[int]) -> ShardSpec:
    """Return the layout for stacked weights from that for a layer's, of this shape."""
    none = (0,) * len(shape)
    dims, priorities = (spec.dims, spec.priorities or none) if spec else (((),) * len(shape), none)
    return ShardSpec(((STAGE,), *dims)).with_priorities((0, *priorities))


def without_stage(spec: ShardSpec) -> ShardSpec:
    """Return a layer's layout from that for stacked weights."""
    return ShardSpec(spec.dims[1:]).with_priorities(spec.priorities[1:])
