"""torchtitan: its Llama 3 on a mesh, where parallelize_fn is a table of marks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..errors import ShardingError
from ..layout.annotate import annotate
from ..layout.mesh import Mesh
from ..runtime.parallelize import parallelize, shard_batch
from . import library

titan: Any = library("torchtitan.config")

BATCH = "dp_replicate+dp_shard"
LLAMA3 = {  # glob -> layout; FSDP: the data axis divides weights, too
    "tok_embeddings.weight": "tp dp_shard",
    "layers.*.attention.w[qkv].weight": "tp dp_shard",
    "layers.*.attention.wo.weight": "dp_shard tp",
    "layers.*.feed_forward.w[13].weight": "tp dp_shard",
    "layers.*.feed_forward.w2.weight": "dp_shard tp",
    "output.weight": "tp dp_shard",
    "layers.*": f"{BATCH} tp _",  # sequence parallel
}


def parallelize_llama(model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
    """Put torchtitan's Llama 3 on the mesh of its ParallelDims: a TrainSpec's parallelize_fn.

    The loop stays torchtitan's: each rank has its loader's rows, and sums its own losses.

    Args:
        model: torchtitan's Transformer, also on the meta device.
        parallel_dims: ParallelDims with dp_replicate, dp_shard and tp.
        job_config: JobConfig. Its mixed precision, activation checkpoints and compile count.

    Returns:
        The module, whose forward takes and returns the rank's rows.

    Raises:
        ShardingError: parallel_dims has cp, pp or ep above 1.

    Example:
        spec = replace(get_train_spec("llama3"), parallelize_fn=parallelize_llama)
        register_train_spec("llama3_mesh", spec)
    """
    for name in ("cp", "pp", "ep"):
        if getattr(parallel_dims, name) > 1:
            raise ShardingError.here(
                f"parallel_dims has {name}={getattr(parallel_dims, name)}",
                fix="use marks of your own and parallelize: docs/parallelize.md, docs/pipelines.md",
            )
    sizes = {name: getattr(parallel_dims, name) for name in ("dp_replicate", "dp_shard", "tp")}
    mesh = Mesh(**sizes)
    # Before apply_ac, whose wrappers change the names that the globs match.
    annotate(model, mesh, LLAMA3)
    if job_config.activation_checkpoint.mode != "none":
        checkpoint = library("torchtitan.distributed.activation_checkpoint")
        checkpoint.apply_ac(model, job_config.activation_checkpoint, model_compile_enabled=False)
    has_parts = sizes["tp"] > 1 and not job_config.parallelism.disable_loss_parallel
    training = job_config.training
    sharded = parallelize(
        model,
        mesh,
        in_specs=f"{BATCH} _",
        out_specs=f"{BATCH} _ {'tp' if has_parts else '_'}",
        backend="inductor" if job_config.compile.enable else "torch",
        param_dtype=_dtype(training.mixed_precision_param),
        reduce_dtype=_dtype(training.mixed_precision_reduce),
    )
    vocabulary = parallel_dims.get_mesh("tp") if has_parts else None
    sharded.register_forward_pre_hook(partial(_whole, mesh), with_kwargs=True)
    sharded.register_forward_hook(partial(_rows, vocabulary))
    return sharded


def _whole(mesh: Mesh, _: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
    """Join all ranks' rows in the first argument. args: this rank's tokens first."""
    return (shard_batch(args[0], mesh, f"{BATCH} _"), *args[1:]), kwargs


def _rows(vocabulary: DeviceMesh | None, _: nn.Module, args: object, logits: DTensor) -> Tensor:
    """Return the logits for this rank's rows.

    vocabulary: the mesh over which they are divided, as torch's loss_parallel takes them; or None.
    """
    rows = logits.to_local()
    if vocabulary is None:
        return rows
    return DTensor.from_local(rows, vocabulary, [Shard(-1)], run_check=False)


def _dtype(name: str) -> torch.dtype | None:
    """Return the dtype that torchtitan names; None for float32, which the weights have."""
    dtype = getattr(torch, name)
    return None if dtype == torch.float32 else dtype
