"""load_full_state_dict: a mesh gets the state that one device has, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..comm.local_ops import part_order
from ..comm.process_groups import ProcessGroups
from ..dtensor.storage import spec_of
from ..errors import ShardingError
from .checkpoint_files import allocate_state, as_plain, as_state
from .full_state import groups_of_state, part_of_shard, tables_of
from .shared_plan import broadcast_text

Source = Mapping[str, Any] | Iterable[tuple[str, Tensor]] | str | Path


def load_full_state_dict(
    model: nn.Module, source: Source | None, optimizer: Optimizer | None = None
) -> None:
    """Load one device's state into a model on a mesh. Rank 0 alone needs it.

    Call it on every rank. One tensor travels at a time, through CPU memory. A model on meta
    gets its memory first. Numbers are cast to the parameter's dtype, as load_state_dict does.

    Args:
        model: The result of `parallelize`, the model that it wrapped, or a module that contains it.
        source: On the mesh's rank 0 a state_dict, (name, tensor) pairs, or a path: a file from
            torch.save or safetensors, or a folder with such files. Ignored on other ranks. With an
            optimizer {"model": ..., "optimizer": ...}, as full_state_dict returns.
        optimizer: The model parameters' optimizer, if it is to get its state too.

    Raises:
        ShardingError: On every rank, if names or shapes are others than the model's. Pairs are
            checked as they come: earlier ones have been loaded then.

    Example:
        >>> import torch.distributed as dist
        >>> from torchgspmd import load_full_state_dict, parallelize
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model, state = torch.nn.Linear(4, 8), torch.nn.Linear(4, 8).state_dict()
        >>> model = parallelize(model, Mesh(data=1))
        >>> load_full_state_dict(model, state)
        >>> model.weight.full_tensor().equal(state["weight"])
        True
        >>> dist.destroy_process_group()
    """
    targets = stored_tensors(model)
    groups = groups_of_state([*targets.items()], "load_full_state_dict")
    load = _Load(groups)
    given = source if groups.rank == 0 else None
    if optimizer is None:
        return load.all(targets, given, model)
    both = cast("Mapping[str, Any]", given if isinstance(given, Mapping) else {})
    lacks_one = load.is_first and not {"model", "optimizer"} <= {*both}
    load.agree('the source is not {"model": ..., "optimizer": ...}' if lacks_one else "")
    load.all(targets, both.get("model"), model)
    load.optimizer(optimizer, both.get("optimizer"))


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a state_dict's contents, by name. A model on meta gets its memory."""
    targets = {name: t for _, tensors in tables_of(model) for name, t in tensors.items()}
    if any(t.is_meta for t in targets.values()):
        model.to_empty(device=_device_of(targets))
        targets = {name: t for _, tensors in tables_of(model) for name, t in tensors.items()}
    return targets


def _device_of(targets: Mapping[str, Tensor]) -> str:
    meshes = [t.device_mesh for t in targets.values() if isinstance(t, DTensor)]
    return meshes[0].device_type if meshes else "cpu"


def without_tied(missing: Mapping[str, object], targets: Mapping[str, Tensor]) -> dict[str, None]:
    """Leave out names whose tensors came by another name."""
    came = {id(t) for name, t in targets.items() if name not in missing}
    return {name: None for name in missing if id(targets[name]) not in came}


class _Load:
    """Sends rank 0's whole tensors; each rank keeps its part."""

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups, self.is_first = groups, groups.rank == 0

    def all(self, targets: dict[str, Tensor], source: object, model: nn.Module) -> None:
        """Load parameters, buffers and extra states."""
        pairs = iter(_pairs(source)) if self.is_first else iter(())
        extra: dict[str, Any] = {}
        # A dict keeps the order of the model for the error's text.
        missing = dict[str, None](dict.fromkeys(targets))
        while (item := self._next(pairs, targets, extra)) is not None:
            name, value = item
            self.put(targets[name], value)
            missing.pop(name, None)
        missing = without_tied(missing, targets)
        problem = f"the state lacks {names_of(missing)}" if missing else ""
        self._raise(problem)
        if extra := self._extra(extra):
            model.load_state_dict(extra, strict=False)

    def _extra(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Return get_extra_state's values, which every rank gets: JSON has to hold them."""
        changed = (name for name, value in extra.items() if not _is_json(value))
        name = next(changed, None)
        self.agree("" if name is None else f"'{name}' is no number, text, list or dict of these")
        return self._said(extra)

    def _next(
        self, pairs: Iterator, targets: dict[str, Tensor], extra: dict
    ) -> tuple[str, Tensor | None] | None:
        """Return rank 0's next name, and there the tensor; None at the end."""
        name, value, problem = None, None, ""
        try:
            for name, value in pairs:
                if not isinstance(value, Tensor):
                    extra[name] = value
                    continue
                problem = problem_with(name, value.shape, targets)
                break
            else:
                name, value = None, None
        except Exception as error:  # of rank 0 alone, for which the others would wait
            name, value, problem = None, None, f"{type(error).__name__}: {error}"
        name, problem = self._said([name, problem])
        self._raise(problem)
        return None if name is None else (name, value)

    def _said(self, value: object) -> Any:
        text = json.dumps(value) if self.is_first else None
        return json.loads(self.groups.watcher.run(broadcast_text, self.groups, text))

    def agree(self, problem: str) -> None:
        """Raise on every rank if rank 0 has a problem."""
        self._raise(self._said(problem))

    def _raise(self, problem: str) -> None:
        if problem:
            raise ShardingError.here(
                problem,
                why="load_full_state_dict takes the names and shapes of the one-device model",
                fix="rename the tensors, or load what there is by model.load_state_dict(strict="
                "False) on every rank",
            )

    @torch.no_grad()
    def put(self, target: Tensor, whole: Tensor | None) -> None:
        """Write rank 0's whole tensor into one of the model's."""
        groups, shape = self.groups, tuple(target.shape)
        made = torch.empty(shape, dtype=target.dtype) if whole is None else whole.detach()
        made = made.to(groups.checked_on, target.dtype).contiguous()
        # As bytes, since gloo lacks some dtypes.
        message = made.view(-1).view(torch.uint8)
        if groups.mesh.size > 1 and made.numel():
            groups.watcher.run(dist.broadcast, message, groups.processes[0], group=groups.checks)
        local = target.to_local() if isinstance(target, DTensor) else target
        if isinstance(target, DTensor):
            spec = spec_of(target, groups.mesh)
            made = part_order(made, spec, groups.mesh)
            made = made[part_of_shard(spec, shape, groups.mesh, groups.coordinates)]
        local.copy_(made)

    def optimizer(self, optimizer: Optimizer, given: Any) -> None:
        """Load an optimizer's state, by the order of its parameters."""
        tensors, plain, problem = dict[str, Tensor](), None, ""
        if self.is_first:
            try:
                plain = as_plain(given, "optimizer", tensors)
            except ShardingError as error:  # of rank 0 alone, for which the others would wait
                problem = error.what
        self.agree(problem)
        plain = self._said(plain)
        with torch.device("meta"):
            allocate_state(plain, tensors)
        described = as_state(plain, tensors)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        count = sum(len(group["params"]) for group in described["param_groups"])
        if count != len(parameters):
            self._raise(
                f"the optimizer has {len(parameters)} parameters, and its state is of {count}"
            )
        for number, values in described["state"].items():
            for key, like in values.items():
                if isinstance(like, Tensor):
                    p, dtype = parameters[number], like.dtype
                    # A state with its parameter's shape is sharded as the parameter.
                    made = (
                        torch.zeros_like(p, dtype=dtype)
                        if p.shape == like.shape
                        else torch.zeros(like.shape, dtype=dtype)
                    )
                    self.put(made, given["state"][number][key] if self.is_first else None)
                    values[key] = made.detach()
        groups = optimizer.state_dict()["param_groups"]
        for group, values in zip(groups, described["param_groups"]):
            own = {k: v for k, v in values.items() if k != "params" and not isinstance(v, Tensor)}
            group |= own
        optimizer.load_state_dict({"state": described["state"], "param_groups": groups})


def _is_json(value: object) -> bool:
    """Return whether JSON gives a value back as it is."""
    try:
        return json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        return False


def problem_with(name: str, shape: torch.Size, targets: Mapping[str, Tensor]) -> str:
    """Return the reason why a tensor cannot be loaded, or nothing."""
    if name not in targets:
        return f"the model has no tensor '{name}'; it has {names_of(targets)}"
    if shape != targets[name].shape:
        return f"'{name}' has the shape {[*shape]}, in the model {[*targets[name].shape]}"
    return ""


def raise_first(problems: Sequence[str], why: str, fix: str) -> None:
    """Raise on every rank if one has a problem. problems: each rank's, or ""."""
    first = next((rank for rank, text in enumerate(problems) if text), None)
    if first is not None:
        where = "" if all(problems) else f"rank {first}: "
        raise ShardingError.here(where + problems[first], why=why, fix=fix)


def names_of(names: Iterable[str]) -> str:
    first, *rest = [repr(name) for name in names]
    shown = [first, *rest[:4]]
    return ", ".join(shown) + (f" and {len(rest) - 4} more" if len(rest) > 4 else "")


def _pairs(source: Any) -> Iterator[tuple[str, Any]]:
    """Yield a source's names and values. Nothing that a file says is executed."""
    if isinstance(source, (str, Path)):
        path = Path(source)
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        files = files or sorted(path.glob("*.pt")) + sorted(path.glob("*.bin"))
        if not files:
            raise ShardingError.here(
                f"there is no file of tensors at {path}",
                fix="pass the path of a file of torch.save or safetensors, or of a folder of these",
            )
        for file in files:
            yield from _file(file)
    elif isinstance(source, Mapping):
        yield from source.items()
    elif source is None:
        raise ShardingError("rank 0 has no source", fix="call load_full_state_dict(model, source)")
    else:
        yield from source


def _file(file: Path) -> Iterator[tuple[str, Any]]:
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                yield name, tensors.get_tensor(name)
        return
    # Mapped: a tensor is read when it is sent, so the file need not fit into memory.
    yield from torch.load(file, map_location="cpu", mmap=True, weights_only=True).items()
