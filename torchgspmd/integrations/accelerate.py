"""accelerate: an Accelerator that puts models on a mesh instead of DistributedDataParallel."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from ..errors import ShardingError
from ..runtime.checkpoint import load, save
from ..runtime.full_state import full_state_dict
from ..runtime.module_proxy import ModuleProxy
from ..runtime.parallelize import parallelize
from . import Meshes, default_in_specs, library
from .own_rows import GlobalBatches

accelerate: Any = library("accelerate")
states: Any = library("accelerate.state")

# One folder for each model and its optimizers, inside save_state's folder.
FOLDER = "gspmd_{}"


def as_one_process(cpu: bool = False) -> None:
    """Show accelerate all ranks as one process, whose files rank 0 writes."""
    if not dist.is_initialized() and "RANK" in os.environ:
        dist.init_process_group()
    states.PartialState(cpu=cpu)
    rank = dist.get_rank() if dist.is_initialized() else 0
    one = {
        "distributed_type": states.DistributedType.NO,
        "num_processes": 1,
        "process_index": rank,
        "local_process_index": int(os.environ.get("LOCAL_RANK", rank)),
    }
    # AcceleratorState copies PartialState when it is made; one made earlier is changed, too.
    for state in (states.PartialState, states.AcceleratorState):
        if state._shared_state:
            state._shared_state.update(one)


@contextmanager
def as_first_process() -> Iterator[None]:
    """Make accelerate act as on the first process: all draw the same random numbers."""
    shared = [s for s in (states.PartialState, states.AcceleratorState) if s._shared_state]
    before = [state._shared_state["process_index"] for state in shared]
    for state in shared:
        state._shared_state["process_index"] = 0
    try:
        yield
    finally:
        for state, rank in zip(shared, before):
            state._shared_state["process_index"] = rank


def check_precision(accelerator: Any) -> None:
    """Raise ShardingError if autocast would be put around a model that is on a mesh already."""
    if accelerator.mixed_precision != "no":
        raise ShardingError.here(
            f"mixed precision '{accelerator.mixed_precision}' is set for a model that is on a mesh",
            why="autocast has to be part of the program, which parallelize makes",
            fix="pass the model of one device with its marks, or leave mixed precision out and "
            "parallelize(..., param_dtype=torch.bfloat16)",
        )


class Accelerator(accelerate.Accelerator):
    """accelerate's Accelerator for a mesh.

    `prepare` calls `parallelize`; the model's optimizers get the parameters on the mesh. Each rank
    gets the whole batch: a loader has one device's batch size. `save_state` and `load_state` are
    gspmd.save and gspmd.load, for any mesh.

    Args:
        mesh: The mesh over all ranks, on which the model is marked.
        options: Further options for `parallelize`; in_specs="auto" if the mesh has a batch axis.
        own_rows: Whether loaders read only a rank's own rows. A batch's tensors are DTensors then,
            and collate functions have to give all ranks the same shapes.
        kwargs: Arguments for accelerate's Accelerator. mixed_precision is its autocast.
    """

    def __init__(
        self,
        mesh: Meshes,
        *,
        options: Mapping[str, Any] | None = None,
        own_rows: bool = False,
        **kwargs: Any,
    ):
        as_one_process(bool(kwargs.get("cpu")))
        self._is_saving, self._on_mesh, self._own_rows = False, list[Any](), own_rows
        super().__init__(**kwargs)
        self.mesh, self.options = mesh, {"in_specs": default_in_specs(mesh), **(options or {})}
        self.register_save_state_pre_hook(self._save)
        self.register_load_state_pre_hook(self._load)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return a model on the mesh; one that is there already stays as it is."""
        if isinstance(model, ModuleProxy):
            check_precision(self)
            if not any(each is model for each in self._models):
                self._models.append(model)
            return model
        model = super().prepare_model(model, *args, **kwargs)
        self._models[-1] = parallelize(model, self.mesh, **self.options)
        return self._models[-1]

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Return accelerate's loader, within one that reads own rows if asked."""
        loader = super().prepare_data_loader(*args, **kwargs)
        return GlobalBatches(loader, self.mesh) if self._own_rows else loader

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader that skips the first `num_batches` batches."""
        if not isinstance(dataloader, GlobalBatches):
            return super().skip_first_batches(dataloader, num_batches)
        rest = super().skip_first_batches(dataloader._loader, num_batches)
        return GlobalBatches(rest, self.mesh, is_own=True)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the model's full state on rank 0, and {} on the others."""
        return {} if self._is_saving else full_state_dict(model)

    def wait_for_everyone(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run rank 0 first: it fills a cache that the others read."""
        if not self.is_main_process:
            self.wait_for_everyone()
        yield
        if self.is_main_process:
            self.wait_for_everyone()

    local_main_process_first = main_process_first

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Write models, optimizers and all else into a folder; call it on every rank."""
        with self._without_optimizers():
            place = super().save_state(*args, **kwargs)
        self.wait_for_everyone()
        return place

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Read a folder that save_state wrote, on any mesh; call it on every rank."""
        with self._without_optimizers(), as_first_process():
            super().load_state(*args, **kwargs)

    @contextmanager
    def _without_optimizers(self) -> Iterator[None]:
        """Keep models and optimizers from accelerate, which would pickle only a rank's shards."""
        self._on_mesh, self._optimizers, self._is_saving = self._optimizers, [], True
        try:
            yield
        finally:
            self._optimizers, self._is_saving = self._on_mesh, False

    def _with_optimizers(self, models: list) -> Iterator[tuple[nn.Module, list]]:
        """Yield each model with the optimizers that update its parameters."""
        for model in models:
            own = {id(p) for p in model.parameters()}
            inner = [each.optimizer for each in self._on_mesh]
            is_own = [any(id(p) in own for g in o.param_groups for p in g["params"]) for o in inner]
            yield model, [o for o, mine in zip(inner, is_own) if mine]

    def _save(self, models: list, weights: list, folder: str) -> None:
        for i, (model, optimizers) in enumerate(self._with_optimizers(models)):
            save(Path(folder, FOLDER.format(i)), model, optimizers, step=self.step)
        # accelerate writes whatever is left in `weights`; the shards are on disk already.
        weights.clear()

    def _load(self, models: list, folder: str) -> None:
        for i, (model, optimizers) in enumerate(self._with_optimizers(models)):
            load(Path(folder, FOLDER.format(i)), model, optimizers)
        # accelerate loads each model that is left in the list.
        models.clear()
