"""load_safetensors: safetensors files into a model on a mesh; each rank reads its own bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..comm.local_ops import part_order
from ..comm.process_groups import ProcessGroups
from ..comm.rank_check import all_gather_rows
from ..dtensor.storage import spec_of
from .full_state import groups_of_state, part_of_shard
from .load_full_state import names_of, problem_with, raise_first, stored_tensors, without_tied
from .module_proxy import ModuleProxy
from .stored_slices import Stored, StoredTensors, stored_in, stored_tensors_of, without_ignored

INDEX = "model.safetensors.index.json"  # as transformers writes it: {"weight_map": {name: file}}


def load_safetensors(
    model: nn.Module,
    folder: str | Path,
    *,
    rename: Callable[[str], str] | None = None,
    strict: bool = True,
) -> list[str]:
    """Load safetensors files into a model on a mesh. Each rank reads only its shards.

    Call it identically on every rank; each rank sees the folder. The ranks send nothing but their
    comparison. A model on meta gets its memory first. Numbers are cast to the parameter's dtype.

    Args:
        model: The result of `parallelize`, the model that it wrapped, or a module that contains it.
        folder: A file, or a folder with such files: all of them, or those that transformers' index
            `model.safetensors.index.json` names.
        rename: Returns the name in the model for a name in a file. Without it, a model of
            transformers takes the names and the shapes that `from_pretrained` takes: one tensor
            for each expert, too.
        strict: Whether a tensor that the model or the files lack is an error.

    Returns:
        The names that were in only one of both: empty with strict=True.

    Raises:
        ShardingError: On every rank and before anything is loaded, if names or shapes are others
            than the model's.

    Example:
        >>> import tempfile, torch.distributed as dist
        >>> from safetensors.torch import save_file
        >>> from torchgspmd import load_safetensors, parallelize
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model, state = torch.nn.Linear(4, 8), torch.nn.Linear(4, 8).state_dict()
        >>> file = tempfile.mkdtemp() + "/model.safetensors"
        >>> save_file(state, file)
        >>> model = parallelize(model, Mesh(data=1))
        >>> load_safetensors(model, file)
        []
        >>> model.weight.full_tensor().equal(state["weight"])
        True
        >>> dist.destroy_process_group()
    """
    # safetensors is optional: only this call needs it.
    safe_open: Any = import_module("safetensors").safe_open
    targets = stored_tensors(model)
    inner = model._model if isinstance(model, ModuleProxy) else model
    groups = groups_of_state([*targets.items()], "load_safetensors")
    with ExitStack() as files:
        found, lacking, problem = StoredTensors(), list[str](), ""
        try:
            stored = dict[str, Stored]()
            for path in _files(Path(folder)):
                stored |= stored_in(files.enter_context(safe_open(path, "pt")))
            found = stored_tensors_of(inner, stored, targets, rename)
            missing = {name: None for name in targets if name not in found.found}
            lacking = without_ignored(inner, without_tied(missing, targets))
            problems = (problem_with(n, t.shape, targets) for n, t in found.found.items())
            problem = next(filter(None, problems), "")
        except Exception as error:  # perhaps of this rank alone, for which the others would wait
            problem = f"{type(error).__name__}: {error}"
        if strict and not problem:
            both = (("the files lack", lacking), ("the model has no", found.unknown))
            problem = "; ".join(f"{verb} {names_of(names)}" for verb, names in both if names)
        # Before anything is written: a rank alone would be left with half a model.
        raise_first(
            all_gather_rows(groups, problem),
            why="load_safetensors takes the names and shapes of the one-device model, or those of "
            "files that transformers converts",
            fix="pass rename=, which returns the model's name for one of a file, or strict=False",
        )
        for name in found.found:
            _read(found, name, targets[name], groups)
        if found.conversions is not None:  # as from_pretrained: save_pretrained writes these names
            vars(inner)["_weight_conversions"] = found.conversions
    return [*lacking, *found.unknown]


def _files(path: Path) -> list[Path]:
    """Return a folder's files, those that an index names if there is one."""
    if path.is_file():
        return [path]
    if (index := path / INDEX).exists():
        names: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
        return [path / name for name in sorted({*names.values()})]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"there is no file of safetensors at {path}")
    return files


@torch.no_grad()
def _read(found: StoredTensors, name: str, target: Tensor, groups: ProcessGroups) -> None:
    local = target.to_local() if isinstance(target, DTensor) else target
    if not isinstance(target, DTensor) or not target.dim():
        local.copy_(found.read(name))
        return
    spec, shape = spec_of(target, groups.mesh), tuple(target.shape)
    part = part_of_shard(spec, shape, groups.mesh, groups.coordinates)
    if local.numel() and spec.parts:
        local.copy_(part_order(found.read(name), spec, groups.mesh)[part])
    elif local.numel():
        local.copy_(found.read(name, part))
