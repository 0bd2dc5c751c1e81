"""Decoders for one microbatch, marked with a run's layout.

Values between layers are sharded over tokens along `model`, too (arXiv 2205.05198).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...layout.mark import mark_sharding
from ...layout.mesh import Mesh
from .config import Config
from .decoder import RANK, Decoder, Layout
from .runs import DecoderRun, misfit

# If parts of the experts divide a part of a dimension, it has a second axis for them.
CONTEXT, MODEL = ("context", "context_owner"), ("model", "model_owner")


@dataclass(frozen=True)
class Axes(Layout):
    """The mesh of one stage, and the axes along which a run's values are sharded.

    batch: of tokens. shard: of weights that are gathered for each product (FSDP); owners: of
    experts; expert_shard: of their weights.
    """

    sizes: Mapping[str, int]
    batch: tuple[str, ...]
    shard: tuple[str, ...]
    owners: tuple[str, ...]
    expert_shard: tuple[str, ...]

    @classmethod
    def of(cls, run: DecoderRun, config: Config) -> Axes:
        """Return a run's axes. Neighbours are along tensor, context, expert, data, then stages.

        Parts of the experts are neighbours; FSDP shards over replicas, then over context.
        """
        experts, fsdp = run.expert if config.experts else 1, max(run.fsdp, 1)
        model = math.gcd(run.tensor, experts)
        context = math.gcd(run.context, experts // model)
        owners = experts // (model * context)
        wide = fsdp > 1 and bool(run.replicas % fsdp)
        shards = fsdp // run.context if wide else fsdp
        both = math.gcd(shards, owners)
        if run.replicas % (shards // both * owners):
            raise misfit(
                f"{experts} parts of the experts and {fsdp} of the weights over {run.replicas} "
                f"replicas of {run.tensor * run.context} devices: a mesh has no such axes"
            )
        sizes = {
            "data": run.replicas // (shards // both * owners),
            "shard": shards // both,
            "owner": owners // both,
            "expert": both,
            **_split("context", run.context, context),
            **_split("model", run.tensor, model),
        }
        own = () if experts == 1 else ("owner", "expert")
        own += CONTEXT[-1:] if "context_owner" in sizes else CONTEXT[:1] * (context > 1)
        own += MODEL[-1:] if "model_owner" in sizes else MODEL[:1] * (model > 1)
        sharded = ("shard", "expert", *(CONTEXT if wide else ())) if fsdp > 1 else ()
        return cls(
            {name: size for name, size in sizes.items() if size > 1} or {"data": 1},
            ("data", "shard", "owner", "expert"),
            sharded,
            own,
            tuple(x for x in sharded if x not in own),
        )

    @property
    def mesh(self) -> Mesh:
        return Mesh(**self.sizes)

    def staged(self, stages: int) -> Axes:
        """Return the axes of all stages."""
        return replace(self, sizes={"stage": stages, **self.sizes}) if stages > 1 else self

    def count(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes.get(name, 1) for name in axes)

    def cut(self, experts: int) -> tuple[int, int]:
        shards = self.count(self.owners)
        return self.mesh.size // shards, shards

    def dim(self, *axes: str) -> str:
        """Return a dimension's entry in a spec."""
        return "+".join(name for name in axes if name in self.sizes) or "_"

    @property
    def tokens(self) -> str:
        return f"{self.dim(*self.batch)} {self.dim(*CONTEXT)}"

    def between(self, x: Tensor) -> Tensor:
        spec = f"{self.dim(*self.batch)} {self.dim(*CONTEXT, *MODEL)} _"
        return mark_sharding(x, self.mesh, spec)

    def along_model(self, x: Tensor, dim: int, sequence: int) -> Tensor:
        dims = ["_"] * x.dim()
        dims[0], dims[sequence] = self.dim(*self.batch), self.dim(*CONTEXT)
        dims[dim] = self.dim(*MODEL)
        return mark_sharding(x, self.mesh, " ".join(dims))


class RunDecoder(Decoder):
    """A published decoder whose values have a run's marks, on a mesh with its stages.

    Example:
        >>> from torchgspmd.tools.decoders.runs import DecoderRun
        >>> with torch.device("meta"):
        ...     model = RunDecoder(DecoderRun("llama3-8b", "h100", 8, "BF16", 8, 1, 4096, tensor=2))
        >>> model.layout.sizes
        {'data': 4, 'model': 2}
    """

    def __init__(self, run: DecoderRun) -> None:
        chosen = run.config
        kinds = [kind for kind, count in chosen.kinds().items() for _ in range(count)]
        axes = Axes.of(run, chosen).staged(run.pipeline)
        super().__init__(chosen, kinds, axes, RANK if run.has_adapters else 0)
        self.run, self.layout = run, axes
        self.register_buffer("angles", torch.empty(run.sequence, chosen.turned // 2))


def _split(name: str, size: int, owned: int) -> dict[str, int]:
    """Return a dimension's axes; parts of the experts divide `owned` of it."""
    if owned in (1, size):
        return {name: size}
    return {name: size // owned, f"{name}_owner": owned}


def marks(axes: Axes, config: Config, kinds: Sequence[str]) -> dict[str, str]:
    """Return the layout of the weights."""
    shard, model = axes.dim(*axes.shard), axes.dim(*MODEL)
    found = {"words": f"{model} {shard}", "head.weight": f"{shard} {model}"}
    layer = "layers.*."
    if config.latent is None:
        found[f"{layer}attention.qkv.weight"] = f"{shard} {model} _ _"
        found[f"{layer}attention.o.weight"] = f"{model} _ _ {shard}"
    else:
        found |= {f"{layer}attention.{name}.weight": f"_ {model} {shard}" for name in ("q", "kv")}
        found |= {f"{layer}attention.down_{name}.weight": f"{shard} _" for name in ("q", "kv")}
        found[f"{layer}attention.o.weight"] = f"{model} _ {shard}"
    feeds = ["feed"] if any("dense" in kind for kind in kinds) else []
    if any("experts" in kind for kind in kinds):
        owners, parts = axes.dim(*axes.owners), axes.dim(*axes.expert_shard)
        found[f"{layer}feed.wide"] = f"{owners} {parts} _"
        found[f"{layer}feed.narrow"] = f"{owners} _ {parts}"
        if config.biases:
            found |= {f"{layer}feed.{name}_bias": f"{owners} _" for name in ("wide", "narrow")}
        feeds += ["feed.shared"] if config.shared_hidden else []
    for feed in feeds:
        found[f"{layer}{feed}.up.weight"] = f"{shard} _ {model}"
        found[f"{layer}{feed}.down.weight"] = f"{model} {shard}"
    return found
