"""Lightning: a strategy for modules on a mesh."""

from __future__ import annotations

from typing import Any

from ..layout.device_mesh import mesh_of
from . import Meshes, library

strategies: Any = library("lightning.pytorch.strategies")


class MeshStrategy(strategies.ModelParallelStrategy):
    """Lightning's ModelParallelStrategy for the devices of a mesh.

    configure_model of the LightningModule calls `parallelize` for the modules that it trains. Each
    rank gets the whole batch: loaders, samplers and schedules are those of one device. Checkpoints
    are folders of torch.distributed.checkpoint; any mesh resumes them.

    Args:
        mesh: The mesh of all processes.
        kwargs: The arguments of ModelParallelStrategy, but the sizes.
    """

    def __init__(self, mesh: Meshes, **kwargs: Any):
        size = mesh_of(mesh).size
        super().__init__(data_parallel_size=size, tensor_parallel_size=1, **kwargs)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Give each rank all rows."""
        return {"num_replicas": 1, "rank": 0}

    def setup(self, trainer: Any) -> None:
        """Set up the module; its sampler stays as it is, in its order."""
        trainer._accelerator_connector.use_distributed_sampler = False
        super().setup(trainer)
