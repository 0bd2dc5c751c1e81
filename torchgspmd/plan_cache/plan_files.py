"""Plan.save and Plan.load: a plan as a file, to look at, to compare, and to simulate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from ..capture import BUFFER, PARAMETER, Input
from ..capture.state.guards import Guards
from ..errors import ShardingError, user_line
from ..fx_passes import Layouts
from ..fx_passes.runnable_plan import RunnablePlan
from ..mesh import Mesh
from .plans import FIELDS, Later, constants_of, decode_graphs, encode_graphs, tensors_of
from .values import Decoder, Encoder, Stale, Unshareable

_FORMAT = 2
_LARGEST = 1 << 20  # elements of a constant in a file
_NEEDED = ("inputs", "outputs", "has_backward", "opened")  # to look at a plan, without running it
_DAMAGED = (KeyError, IndexError, TypeError, ValueError, AttributeError)

P = TypeVar("P", bound="PlanFiles")


class PlanFiles(Later, RunnablePlan):
    """The methods of a plan that write and read files. _lacks: why a plan cannot be simulated."""

    mesh: Mesh
    captured: Any
    seconds: dict[str, float]
    counts: dict[str, int]
    _layouts: Layouts | None
    _lacks: str | None = None

    def save(self, path: str | Path) -> None:
        """Write the plan to a file of JSON, which `Plan.load` reads.

        It has the graphs, the layouts and their reasons, but no values of parameters.

        Args:
            path: The file.

        Raises:
            ShardingError: The program calls what has no name, or has large constants.

        Example:
            >>> import os, tempfile
            >>> x, w = torch.ones(4, 8), torch.ones(8, 16)
            >>> specs = ("data model", "model _")
            >>> result = plan(torch.matmul, x, w, mesh=Mesh(data=2, model=4), in_specs=specs)
            >>> path = os.path.join(tempfile.mkdtemp(), "plan.json")
            >>> result.save(path)
            >>> str(Plan.load(path)) == str(result)
            True
        """
        encoder, lacks = Encoder(), self._lacks
        fields: dict[str, Any] = {}
        try:
            for name in FIELDS:
                try:
                    fields[name] = encoder.encode(getattr(self.captured, name))
                except Unshareable as error:
                    if name in _NEEDED:
                        raise
                    fields[name], lacks = None, lacks or str(error)
            text = {
                "format": _FORMAT,
                "mesh": str(self.mesh),
                "lacks": lacks,
                "seconds": self.seconds,
                "counts": self.counts,
                "reasons": self._layouts and list(_reasons(self._layouts, encoder)),
                "constants": dict(constants_of(self.captured, self.program_graph, _LARGEST)),
                **encode_graphs(self, fields, encoder),
            }
        except Unshareable as error:
            raise ShardingError(
                "this plan cannot be written to a file",
                where=user_line(),
                why=str(error),
                fix="register large tensors as buffers; name operations by torch.library",
            ) from error
        Path(path).write_text(json.dumps(text), encoding="utf-8")

    @classmethod
    def load(cls: type[P], path: str | Path, model: nn.Module | None = None) -> P:
        """Read a plan that `save` has written. Nothing of the file is evaluated.

        Args:
            path: The file.
            model: The module whose parameters `simulate` is to take. Without it the plan of a
                module cannot be simulated. What its forward reads besides is not compared.

        Returns:
            The plan: print it, report, estimate, compare, explain it (without costs).

        Raises:
            ShardingError: It is no such file, of another version, or of another model.

        Example:
            >>> import os, tempfile
            >>> model, x = torch.nn.Linear(8, 8), torch.ones(4, 8)
            >>> path = os.path.join(tempfile.mkdtemp(), "plan.json")
            >>> plan(model, x, mesh=Mesh(data=2), in_specs=("data _",)).save(path)
            >>> Plan.load(path, model).simulate(x).allclose(model(x))
            True
        """
        try:
            text = json.loads(Path(path).read_text(encoding="utf-8"))
            if text["format"] != _FORMAT:
                raise Stale(f"its format is {text['format']}, that of this version {_FORMAT}")
            mesh = Mesh.parse(text["mesh"])
            plan = decode_graphs(text, mesh, cls, lambda inputs: _tensors(inputs, model), Guards())
            for each in (plan, plan.captured):
                each.decode_all()
            if text["reasons"] is not None:
                plan._layouts = _layouts(text["reasons"], mesh, Decoder(text["records"]))
        except (Stale, Unshareable, *_DAMAGED) as error:
            raise ShardingError(
                f"{path} is no plan for this program",
                where=user_line(),
                why=str(error),
                fix="plan it again, and save it",
            ) from error
        plan.seconds, plan._lacks = text["seconds"], text["lacks"]
        plan.counts = text.get("counts", {})
        if model is None and any(i.kind in (PARAMETER, BUFFER) for i in plan.captured.inputs):
            plan._lacks = plan._lacks or "it has no parameters: Plan.load(path, model)"
        return plan

    def check_complete(self) -> None:
        """Raise ShardingError if the plan was read from a file that does not suffice to run it."""
        if self._lacks:
            raise ShardingError(
                "this plan was read from a file, and cannot be simulated",
                where=user_line(),
                why=self._lacks,
                fix="torchgspmd.plan() of the model",
            )


def _tensors(inputs: tuple[Input, ...], model: nn.Module | None) -> list[Tensor]:
    """Return the parameters and buffers of the model; on meta without one."""
    if model is not None:
        return tensors_of(inputs, model)
    state = [i for i in inputs if i.kind in (PARAMETER, BUFFER)]
    return [torch.empty(i.shape, dtype=i.dtype, device="meta") for i in state]


def _reasons(layouts: Layouts, encoder: Encoder) -> Iterator[list[Any]]:
    """Yield a row for every value: name, layout, and for each axis where it came from, and why."""
    for node, spec in layouts.spec.items():
        origins = [
            [axis, before and before.name, why]
            for axis in spec.sharding_axes
            for before, why in [layouts.origin.get((node, axis), (None, None))]
            if why is not None
        ]
        yield [node.name, encoder.encode(spec), origins]


def _layouts(rows: list[Any], mesh: Mesh, decoder: Decoder) -> Layouts:
    """Return the layouts of these rows, of values that have nothing but names."""
    graph, layouts = fx.Graph(), Layouts(mesh, {}, {})
    nodes: dict[str, fx.Node] = {}
    for name, spec, _ in rows:
        node = nodes[name] = graph.placeholder(name)
        node.name, layouts.spec[node] = name, decoder.decode(spec)
    for name, _, origins in rows:
        for axis, before, why in origins:
            origin = nodes[before] if before is not None else None
            layouts.origin[nodes[name], axis] = origin, why
    return layouts
