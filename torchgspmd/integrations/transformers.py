"""transformers: a Trainer for models on a mesh."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from ..compat.private_apis import _pytree as pytree
from ..layout.spec_notation import SAME
from ..runtime.full_state import write_whole
from ..runtime.load_safetensors import INDEX, load_safetensors
from ..runtime.module_proxy import ModuleProxy
from ..runtime.parallelize import parallelize
from . import Meshes, batch_parts, default_in_specs, library
from .accelerate import as_first_process, as_one_process, check_precision
from .own_rows import global_batch, read_own_rows

transformers: Any = library("transformers")

OPTIMIZER = "optimizer"  # a torch.distributed.checkpoint folder in each checkpoint
SCHEDULER = "scheduler.pt"
WEIGHTS = ("model.safetensors", INDEX)


class Trainer(transformers.Trainer):
    """transformers' Trainer for a mesh: `mesh=` is the one argument more.

    Losses, gradient norms, learning rates and weights equal a single process's with the same global
    batch: per_device_train_batch_size times the devices along the batch's axes. Checkpoints have
    transformers' weight files; the optimizer's state is sharded. Any mesh resumes them.

    Args:
        model: The single-device model with its marks, or the module from `parallelize`.
        args: The TrainingArguments.
        mesh: The mesh over all ranks.
        options: Further options for `parallelize`; in_specs="auto" if the mesh has a batch axis.
        own_rows: Whether each rank reads only its own rows in training. The data collator has to
            give all ranks the same shapes. Evaluation reads all rows.
        kwargs: Arguments for transformers' Trainer.
    """

    out_specs: str | None = SAME  # logits stay where they are: the loss alone is gathered

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        *rest: Any,
        mesh: Meshes,
        options: Mapping[str, Any] | None = None,
        own_rows: bool = False,
        **kwargs: Any,
    ):
        self._own_rows = own_rows
        # A copy, since the batch sizes below are multiplied in place.
        args = copy.copy(args or transformers.TrainingArguments("tmp_trainer"))
        reads_logits = kwargs.get("compute_loss_func") or args.label_smoothing_factor
        out_specs = None if reads_logits else self.out_specs
        defaults = {"in_specs": default_in_specs(mesh), "out_specs": out_specs}
        self._mesh, self._options = mesh, {**defaults, **(options or {})}
        args.device  # noqa: B018 (starts the processes as transformers would)
        as_one_process(args.use_cpu)
        # With several GPUs transformers would wrap the model in torch's DataParallel.
        args._n_gpu = min(args.n_gpu, 1)
        args.per_device_train_batch_size *= batch_parts(mesh)
        args.per_device_eval_batch_size *= batch_parts(mesh)
        super().__init__(model, args, *rest, **kwargs)
        if isinstance(model, ModuleProxy):
            check_precision(self.accelerator)
        elif not isinstance(self.model, ModuleProxy):
            self.model = self._on_mesh(self.model)
        # accelerate lets it be from now on; setattr since this is no tensor, for pyright.
        setattr(self.model, "_is_accelerate_prepared", True)  # noqa: B010
        self.model_wrapped = self.model

    def _on_mesh(self, model: nn.Module) -> nn.Module:
        """Put a model on the mesh; accelerate has put its autocast around forward before."""
        model = self.accelerator.prepare_model(model)
        self.accelerator._models.clear()
        return parallelize(model, self._mesh, **self._options)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        model = self._on_mesh(super().call_model_init(trial))
        setattr(model, "_is_accelerate_prepared", True)  # noqa: B010
        return model

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss as a whole tensor, with the outputs where they are computed."""
        found = super().compute_loss(*args, **kwargs)
        # The outputs stay sharded: training reads the loss alone.
        if isinstance(found, tuple):
            return _whole(found[0]), *found[1:]
        return _whole(found)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map(_whole, super().prediction_step(*args, **kwargs))

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        with as_first_process():  # all ranks' workers draw the same numbers
            return super()._get_dataloader(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Return the training loader, which reads only this rank's rows if so asked."""
        loader = super().get_train_dataloader()
        return read_own_rows(loader, self._mesh) if self._own_rows else loader

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a step's batches, and their token count over all ranks."""
        if self._own_rows:
            epoch_iterator = (global_batch(batch, self._mesh) for batch in epoch_iterator)
        batches, count = super().get_batch_samples(epoch_iterator, *args, **kwargs)
        return batches, _whole(count)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        # super() without arguments does not work inside the lambda.
        write = super()._save
        write_whole(self.model, lambda: write(output_dir, state_dict))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # On every rank: each writes its shards. Rank 0 alone writes the small scheduler file.
        dcp.save(self._optimizer_state(), checkpoint_id=Path(output_dir, OPTIMIZER))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER))

    def _optimizer_state(self) -> dict[str, Any]:
        found: Any = get_optimizer_state_dict(self.model, self.optimizer.optimizer)
        return found

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (folder := Path(checkpoint, OPTIMIZER)).is_dir():
            return
        state = self._optimizer_state()
        dcp.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(self.model, self.optimizer.optimizer, state)
        scheduler = torch.load(Path(checkpoint, SCHEDULER), weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)
        if dist.is_initialized():
            dist.barrier()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if any(Path(resume_from_checkpoint, name).exists() for name in WEIGHTS):
            load_safetensors(self.model, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value
