"""Lightning: a strategy for modules on a mesh."""

from __future__ import annotations

from typing import Any

from ..layout.layout_rules import mesh_of
from . import Meshes, library
from .own_rows import global_batch, read_own_rows

strategies: Any = library("lightning.pytorch.strategies")


class MeshStrategy(strategies.ModelParallelStrategy):
    """Lightning's ModelParallelStrategy for a mesh.

    The LightningModule's configure_model calls `parallelize` for the modules that it trains. Each
    rank gets the whole batch: loaders, samplers and schedules are a single device's. Checkpoints
    are torch.distributed.checkpoint folders; any mesh resumes them.

    Args:
        mesh: The mesh over all ranks.
        own_rows: Whether each rank reads only its own rows. A batch's tensors are DTensors then,
            and collate functions have to give all ranks the same shapes.
        kwargs: Arguments for ModelParallelStrategy, except the sizes.
    """

    def __init__(self, mesh: Meshes, *, own_rows: bool = False, **kwargs: Any):
        # Lightning lays out its own mesh by these sizes; they have to multiply to the world size.
        size, self._mesh, self._own_rows = mesh_of(mesh).size, mesh, own_rows
        super().__init__(data_parallel_size=size, tensor_parallel_size=1, **kwargs)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Give each rank all rows."""
        return {"num_replicas": 1, "rank": 0}

    def setup(self, trainer: Any) -> None:
        """Set up the module; its sampler stays as it is, in its order."""
        trainer._accelerator_connector.use_distributed_sampler = False
        super().setup(trainer)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader that reads only this rank's rows, if so asked."""
        loader = super().process_dataloader(dataloader)
        return read_own_rows(loader, self._mesh) if self._own_rows else loader

    def batch_to_device(self, *args: Any, **kwargs: Any) -> Any:
        """Move a batch to the device; join all ranks' rows if each has read its own."""
        batch = super().batch_to_device(*args, **kwargs)
        return global_batch(batch, self._mesh) if self._own_rows else batch
