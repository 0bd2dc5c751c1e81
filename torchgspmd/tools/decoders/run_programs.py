"""Programs of a decoder's layers: captured once for each size, planned in the layouts of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from ...capture import Captured, capture
from ...compiler.api import compile_plan
from ...compiler.options import AdvancedSettings, Options
from ...compiler.plan import Plan
from ...layout.annotate import glob_pattern
from ...layout.mark import mark_sharding_op
from ...shard_spec import ShardSpec
from .decoder import RANK, Decoder
from .run_layouts import CONTEXT, MODEL, Axes, marks
from .runs import DecoderRun

NAMES = ("data", "shard", "owner", "expert", *CONTEXT, *MODEL)  # in the order of Axes.sizes


@dataclass
class Programs:
    """Programs that the plans of several runs share.

    They share no results of planning: a plan would depend on those before it, and the difference of
    two plans would be no layer.
    """

    captures: dict[object, Captured] = field(default_factory=dict)

    def plan(self, run: DecoderRun, kinds: Sequence[str], axes: Axes) -> Plan:
        """Plan a microbatch in layers of these kinds, on the devices of a stage."""
        program = placed(self.captured(run, kinds, axes), axes, marks(axes, run.config, kinds))
        inputs = [ShardSpec.parse(spec) for spec in (axes.tokens, axes.tokens, "_ _")]
        return compile_plan(
            program,
            axes.mesh,
            [*inputs, *[None for _ in program.state_inputs]],
            Options(
                grad=True,
                hardware=run.hardware,
                advanced=AdvancedSettings(regather="always", rng="native"),
            ),
            of_module=True,
            device="meta",
        )

    def captured(self, run: DecoderRun, kinds: Sequence[str], axes: Axes) -> Captured:
        """Return the program with the marks of values, along all axes that a mesh may have."""
        config, rows = run.config, run.micro_batch * run.replicas
        cut = axes.cut(config.experts) if config.experts else None
        key = config, (*kinds,), rows, run.sequence, cut, run.has_adapters
        if key not in self.captures:
            # An axis of one device changes no shape.
            every = replace(axes, sizes={name: axes.sizes.get(name, 1) for name in NAMES})
            with torch.device("meta"):
                model = Decoder(config, kinds, every, RANK if run.has_adapters else 0)
                tokens = torch.empty(rows, run.sequence, dtype=torch.long)
                angles = torch.empty(run.sequence, config.turned // 2)
            arguments = tokens, tokens, angles
            self.captures[key] = capture(model, arguments, {}, every.mesh, grad=True)
        return self.captures[key]


def placed(captured: Captured, axes: Axes, weights: Mapping[str, str]) -> Captured:
    """Return a program with marks on a mesh's axes, and with those of the weights, by glob."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in captured.graph.nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
        if node.target is mark_sharding_op._opoverload:
            value, _, spec = new[node].args
            dims = (axes.dim(*entry.split("+")) for entry in str(spec).split())
            new[node].args = (value, str(axes.mesh), " ".join(dims))
    found = {glob_pattern(glob): ShardSpec.parse(spec) for glob, spec in weights.items()}

    def mark(name: str) -> ShardSpec | None:
        return next((spec for glob, spec in found.items() if glob.fullmatch(name)), None)

    inputs = [replace(each, mark=mark(each.name)) for each in captured.inputs]
    return replace(captured, graph=graph, inputs=inputs)
