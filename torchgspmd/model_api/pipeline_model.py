"""pipeline_model: a model whose layers become stages, and whose forward stays as it is.

A pipeline with backwards between forwards needs the part behind the layers as a function. The
model's own forward is that function: it runs again for each microbatch, and the call of its layers
returns the last stage's result. Of the values before the layers a program keeps those that are read
behind them. The first run ends where the layers are called: it has the first stage's values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..compat.patches import setting
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError, did_you_mean
from ..layout.mesh import Mesh
from .between_blocks import Between, results_of_loops
from .block_loops import BlockLoop, first_loops
from .pipeline_of_blocks import pipeline
from .pipelined_blocks import Pipeline, at_blocks, in_model
from .state_routes import SharedArguments

M = TypeVar("M", bound=nn.Module)


def pipeline_model(
    model: M,
    layers: str | Sequence[str],
    mesh: Mesh | DeviceMesh,
    axis: str = "stage",
    *,
    microbatches: int,
    schedule: str = "auto",
    repeats: int = 1,
    recompute: bool = False,
    memory: int | None = None,
    rows: Sequence[str] | None = None,
) -> M:
    """Put a model's layers into stages, with backwards between forwards.

    The model's code stays: its forward calls its layers one after the other, and returns the mean
    loss, alone or with other results, which are None in a training step. Without gradients, in eval
    mode and on one device all results are there. Parameters have the names that `pipeline` gives
    them, so the call comes before the optimizer is made.

    Args:
        model: The model, which is changed.
        layers: The path of its ModuleList, Sequential or ModuleDict, such as "model.layers". Or
            several, in the order in which forward calls them ("encoder.layers", "decoder.layers"):
            the last one's backwards run between its forwards, the others' after all of their
            forwards.
        mesh: The devices, also as torch's DeviceMesh.
        axis: The axis whose devices are the stages.
        microbatches: Number of parts into which the batch is divided.
        schedule: "1f1b", "zero_bubble", "dualpipev", "gpipe", "auto": as in `pipeline` with a loss.
        repeats: How often a microbatch passes each stage.
        recompute: Whether the backward computes the stages again.
        memory: The bytes that a device may keep for backwards.
        rows: Names of the layers' further arguments that have a row for each batch row.

    Returns:
        The model.

    Raises:
        ShardingError: There are no such layers, no group of them repeats, a part of the model is a
            pipeline already, or `pipeline` refuses an argument.

    Example:
        >>> from torchgspmd import Mesh, plan
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        ...     def forward(self, x):
        ...         for layer in self.layers:
        ...             x = layer(x)
        ...         return x.square().mean()
        >>> mesh = Mesh(stage=4)
        >>> model = pipeline_model(Model(), "layers", mesh, microbatches=8, schedule="1f1b")
        >>> plan(model, torch.ones(16, 8), mesh=mesh, grad=True).summary().splitlines()[-2]
        'pipeline over stage: 1f1b 4x8, 27% of the time idle, activations of 4 x 64 B'
    """
    paths = (layers,) if isinstance(layers, str) else tuple(layers)
    modules = dict(model.named_modules())
    for path in paths or ("",):
        found = modules.get(path)
        if isinstance(found, nn.ModuleDict) and [*found] != [*map(str, range(len(found)))]:
            raise ShardingError.here(
                f"the layers in '{path}' have the names {[*found][:4]}",
                why="the weights of a pipeline have the layers' numbers in their names",
                fix="name the layers '0', '1', ..., in the order in which forward calls them",
            )
        if not path or not isinstance(found, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            kinds = nn.ModuleList, nn.Sequential, nn.ModuleDict
            lists = [n for n, m in modules.items() if n and isinstance(m, kinds)]
            raise ShardingError.here(
                f"the model has no list of layers '{path}'", fix=did_you_mean(path, lists)
            )
    if any(isinstance(module, Pipeline) for module in modules.values()):
        raise _two_pipelines()
    taken = {path: _arguments([*modules[path].children()]) for path in paths}
    for path in paths:
        is_last = path == paths[-1]
        # An argument of other layers alone is none of these.
        others = {*chain(*taken.values())} - {*taken[path]}
        own = None if rows is None else [name for name in rows if name not in others]
        pipe = pipeline(
            modules[path].children(),
            mesh,
            axis,
            microbatches=microbatches,
            schedule=schedule if is_last else "auto",
            repeats=repeats,
            recompute=recompute,
            loss=in_model if is_last else None,
            memory=memory if is_last else None,
            rows=own,
        )
        pipe.is_dict = isinstance(modules[path], nn.ModuleDict)  # pyright: ignore
        model.set_submodule(path, pipe)
    kind = type(model)

    @wraps(kind.forward)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> Any:
        pipe = self.get_submodule(paths[-1])
        assert isinstance(pipe, Pipeline)
        is_trained = self.training and torch.is_grad_enabled() and pipe.runs_by_schedule()
        if not is_trained or at_blocks.get() is not None:
            return results_of_loops(kind.forward(self, *args, **kwargs))
        result = _Step(lambda *a, **k: kind.forward(self, *a, **k), pipe, (args, kwargs)).run()
        _forget_values(self)
        return result

    # A class of its own, as torch's fully_shard does: the instance may be copied.
    names = {"forward": forward, "__module__": kind.__module__}
    model.__class__ = cast(Any, type(kind.__name__, (kind,), names))
    return model


def _forget_values(model: nn.Module) -> None:
    """Put None in place of values between two blocks that forward keeps in attributes."""
    for module in model.modules():
        for key, value in [*vars(module).items()]:
            if not key.startswith("_"):
                leaves, tree = pytree.tree_flatten(value)
                if any(isinstance(x, Between) for x in leaves):
                    kept = [None if isinstance(x, Between) else x for x in leaves]
                    setattr(module, key, pytree.tree_unflatten(kept, tree))


def _arguments(layers: Sequence[nn.Module]) -> list[str]:
    """Return the names of the arguments that layers take."""
    return [*inspect.signature(layers[0].forward).parameters] if layers else []


class _Step:
    """A training step's forward. arguments: the call's, positional and by keyword."""

    def __init__(self, forward: Callable[..., Any], pipe: Pipeline, arguments: object) -> None:
        self.forward, self.pipe = forward, pipe
        self.leaves, self.tree = pytree.tree_flatten(arguments)
        self.before: dict[Pipeline, object] = {}  # results of the lists that forward calls before
        self.loops: dict[nn.Module, BlockLoop] = {}
        self.results: list[Any] = []
        self.tree_of_results: Any = None

    def run(self) -> Any:
        """Return the forward's results: the loss, and None in place of other tensors."""
        x, arguments = self._entered()
        batch = pytree.tree_leaves(x)[0].shape[0]
        rows: dict[str, object] = {
            str(i): leaf
            for i, leaf in enumerate(self.leaves)
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == batch
        }
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor) and leaf.dim()]
        if tensors and not rows:
            raise ShardingError.here(
                f"the layers take {batch} rows, and no argument of the model has as many",
                why="a microbatch is a part of dimension 0, of the arguments and of this value",
                fix="put the batch into dimension 0 before the layers",
            )
        rows |= {f"{_BEFORE}{i}": value for i, value in enumerate(self.before.values())}
        loss = self.pipe.scheduled(self._behind, x, arguments, rows)
        results = [loss if value is _LOSS else value for value in self.results]
        return pytree.tree_unflatten(results, self.tree_of_results)

    def _entered(self) -> tuple[object, Sequence[SharedArguments]]:
        """Run forward up to its layers; return what these are called with."""

        def enter(pipe: Pipeline, x: object, arguments: Sequence[SharedArguments]) -> object:
            if pipe is self.pipe:
                raise _Entered(x, arguments)
            if pipe in self.before:
                raise _called_twice()
            self.before[pipe] = pipe.outputs_of(x, arguments)
            return self.before[pipe]

        try:
            self._call(self.leaves, enter)
        except _Entered as entered:
            return entered.x, entered.arguments
        raise ShardingError.here(
            "forward does not call the layers that pipeline_model has put into stages",
            fix="name the layers that it calls, or call pipeline in forward",
        )

    def _behind(self, y: object, **rows: Any) -> Tensor:
        """Return a microbatch's loss for the last stage's result."""

        called: set[Pipeline] = set()

        def leave(pipe: Pipeline, *_: object) -> object:
            if pipe in called:
                raise _called_twice()
            called.add(pipe)
            if pipe is self.pipe:
                return y
            if pipe not in self.before:
                raise _two_pipelines()
            return rows[f"{_BEFORE}{[*self.before].index(pipe)}"]

        leaves = [rows.get(str(i), leaf) for i, leaf in enumerate(self.leaves)]
        results, self.tree_of_results = pytree.tree_flatten(self._call(leaves, leave))
        scalars = (isinstance(x, Tensor) and not x.dim() for x in results)
        results = [results_of_loops(x) if known else x for x, known in zip(results, scalars)]
        # torch.vmap's tensors do not tell whether they have a gradient.
        scalars = (x for x in results if isinstance(x, Tensor) and not x.dim())
        loss = next((x for x in scalars if x.is_floating_point()), None)
        if loss is None:
            raise ShardingError.here(
                "the model returns no scalar, and its layers are stages of a pipeline",
                why="a microbatch's backward begins with its loss",
                fix="return the mean loss, or use pipeline for the layers alone",
            )
        self.results = [
            _LOSS if x is loss else None if isinstance(x, Tensor) else x for x in results
        ]
        return loss

    def _call(self, leaves: Sequence[object], stand_in: Callable[..., Any]) -> Any:
        args, kwargs = pytree.tree_unflatten([*leaves], self.tree)
        with setting(at_blocks, stand_in), setting(first_loops, self.loops):
            return self.forward(*args, **kwargs)


_LOSS, _BEFORE = object(), "before"


def _two_pipelines() -> ShardingError:
    return ShardingError.here(
        "a model of pipeline_model has two pipelines",
        why="a microbatch passes each list of layers once",
        fix="name all lists in one call of pipeline_model, in the order of their calls",
    )


def _called_twice() -> ShardingError:
    return ShardingError.here(
        "forward calls layers that are stages of a pipeline a second time",
        why="a microbatch passes each list of layers once",
        fix="use a list with an entry for each call, or pipeline for the layers alone",
    )


class _Entered(BaseException):
    """Ends a forward where it calls its layers. No `except Exception` of a model sees it."""

    def __init__(self, x: object, arguments: Sequence[SharedArguments]) -> None:
        super().__init__()
        self.x, self.arguments = x, arguments
