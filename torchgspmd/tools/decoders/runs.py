"""A training run of a published decoder, in the layout and by the recipe of a framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...comm.hardware import Hardware
from ...errors import ShardingError
from .config import Config, config

PRECISIONS = ("BF16", "FP8", "MXFP8", "NVFP4")


@dataclass(frozen=True)
class DecoderRun:
    """A run. sequence: tokens. fsdp: devices that weights are sharded over, 0 for data parallelism
    with a distributed optimizer. virtual_stages: stages of a device. has_adapters: it trains
    adapters of low rank (LoRA) alone. is_automodel: it is one of NeMo Automodel's, with models of
    transformers, whose gate chooses neighbouring experts and whose layers are checkpointed whole;
    otherwise Megatron's.
    """

    model: str
    system: str | Hardware
    gpus: int
    precision: str
    global_batch: int
    micro_batch: int
    sequence: int
    fsdp: int = 0
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    virtual_stages: int = 1
    expert: int = 1
    has_adapters: bool = False
    is_automodel: bool = False

    @property
    def config(self) -> Config:
        found = config(self.model)
        return replace(found, predictions=0) if self.is_automodel else found

    @property
    def hardware(self) -> Hardware:
        """Return the hardware; a run takes as many devices of each domain as divide its number."""
        name = self.system
        found = Hardware.of(name.lower() if isinstance(name, str) else name)
        first, *rest = found.links
        most = int(min(first.devices, self.gpus))
        joined = max(n for n in range(1, most + 1) if self.gpus % n == 0)
        return replace(found, links=(replace(first, devices=joined), *rest)) if rest else found

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the layout's sizes, by their letters."""
        return {
            "d": self.replicas,
            "t": self.tensor,
            "p": self.pipeline,
            "v": self.virtual_stages,
            "c": self.context,
            "e": self.expert,
            "f": self.fsdp,
        }

    @property
    def layout(self) -> str:
        """Return the sizes that are more than one, by letters, and microbatches x their size."""
        names = " ".join(f"{name}{size}" for name, size in self.sizes.items() if size > 1)
        return f"{names or 'd1'}; {self.microbatches} x {self.micro_batch}"

    @property
    def replicas(self) -> int:
        """Return how many parts of the batch are computed at once."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def microbatches(self) -> int:
        return self.global_batch // max(self.micro_batch * self.replicas, 1)

    def check(self) -> None:
        """Raise ShardingError if its numbers do not fit each other."""
        whole = self.tensor * self.pipeline * self.context
        if self.gpus % whole:
            raise misfit(
                f"{self.gpus} gpus are not a multiple of tensor {self.tensor} x pipeline "
                f"{self.pipeline} x context {self.context}"
            )
        if self.global_batch % (self.micro_batch * self.replicas):
            raise misfit(
                f"global_batch {self.global_batch} is not a multiple of micro_batch "
                f"{self.micro_batch} x {self.replicas} replicas"
            )
        if self.sequence % (self.context * self.tensor):
            raise misfit(
                f"sequence {self.sequence} is not a multiple of context {self.context} x tensor "
                f"{self.tensor}"
            )
        if self.precision not in PRECISIONS:
            raise misfit(f"precision is '{self.precision}'; there are {', '.join(PRECISIONS)}")
        # Weights are sharded over replicas, or over these and parts of the sequence.
        shards = self.fsdp // self.context if self.fsdp % self.context == 0 else 0
        fits = (n > 0 and self.replicas % n == 0 for n in (self.fsdp, shards))
        if self.fsdp > 1 and not any(fits):
            raise misfit(f"fsdp {self.fsdp} does not divide {self.replicas} replicas")


def misfit(text: str) -> ShardingError:
    return ShardingError.here(text, fix="take sizes that divide each other")
