"""peft: adapters for a model that is on a mesh already.

For other models call peft.get_peft_model, mark the result, then `parallelize` it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, cast

from torch import nn
from torch.distributed.tensor import DTensor

from ..compiler.options import Options
from ..errors import ShardingError
from ..layout.annotate import annotate
from ..runtime.full_state import Gather, groups_of_state, tables_of
from ..runtime.parallelize import parallelize
from ..runtime.sharded_module import ShardedModule
from . import library

peft: Any = library("peft")

SPENT = ("shard_updates",)  # it has laid out the weights already


def get_peft_model(
    model: nn.Module, config: Any, *args: Any, marks: Mapping[str, Any] | None = None, **kwargs: Any
) -> nn.Module:
    """Return a model on its mesh with peft's adapters, whose names and shapes are one device's.

    Call it on every rank, and make the optimizer afterwards. While peft initializes adapters, each
    rank has the whole weights in CPU memory: DoRA, PiSSA and the like read them.

    Args:
        model: A module from `parallelize`.
        config: A peft configuration.
        args, kwargs: Further arguments for peft.get_peft_model.
        marks: Layouts for the adapters, as `annotate` takes them. Without: replicated.

    Raises:
        ShardingError: The model is not on a mesh.
    """
    if not isinstance(model, ShardedModule):
        raise ShardingError.here(
            "the model is on no mesh",
            fix="call peft.get_peft_model, then mark the model, then call parallelize",
        )
    with _whole_weights(model):
        adapted = peft.get_peft_model(model._model, config, *args, **kwargs)
    mesh, chosen = model._layout or model._mesh, model._options
    if marks:
        annotate(adapted, mesh, marks)
    options = {each.name: getattr(chosen, each.name) for each in fields(chosen)}
    options = {n: v for n, v in options.items() if v != getattr(Options, n) and n not in SPENT}
    specs = {"in_specs": model._in_specs, "out_specs": model._out_specs}
    return parallelize(adapted, mesh, **specs, **options)


@contextmanager
def _whole_weights(model: nn.Module) -> Iterator[None]:
    """Replace a model's tensors by plain whole ones for a while; frozen ones stay frozen."""
    tables = [*tables_of(model)]
    stored = {id(t): (name, t) for _, tensors in tables for name, t in tensors.items()}
    gather = Gather(groups_of_state([*stored.values()], "get_peft_model"), rank0_only=False)
    whole: dict[int, Any] = {}
    for key, (_, tensor) in stored.items():
        made = cast(Any, gather.whole(tensor)).to(tensor.device)
        is_parameter = isinstance(tensor, nn.Parameter)
        whole[key] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
    # Copies: peft replaces and adds entries while the block runs.
    before = [dict(table) for table, _ in tables]
    for table, _ in tables:
        table.update({n: whole[id(t)] for n, t in table.items() if id(t) in whole})
    try:
        yield
    finally:
        for (table, _), tensors in zip(tables, before):
            table.update(tensors)
    for key, (_, tensor) in stored.items():
        if isinstance(tensor, DTensor) and tensor.is_leaf:
            tensor.requires_grad_(whole[key].requires_grad)
