"""train_step: a model's forward, backward, clipping and update as one module.

    step = parallelize(train_step(model, optimizer), mesh, shard_updates="data")
    loss = step(tokens, targets)

The module computes a training loop's step on one device. Planned as a whole, its updates are
sharded as the weights are stored (weight-update sharding, arXiv 2004.13336). Gradients are
reduce-scattered, and weights gathered in the dtype that the model computes in, where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..capture.rewrites.microbatches import Microbatches, check_count
from ..capture.state.dependencies import with_tensors
from ..capture.trace_context import compiling
from ..errors import ShardingError
from ..layout.mark import follow_mark
from .own_counts import load_counts, save_counts
from .own_step import FirstStates, first_states, precise, run_step
from .update_rules import Rule, rule_of


class TrainStep(nn.Module):
    """One training step: call it with a batch, and it returns the loss.

    model: the model. optimizers: each has some of its parameters; their states are buffers here,
    too, named by the state, then the parameter: "exp_avg.blocks.0.weight".
    """

    steps: Tensor

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        loss: Callable[..., Any] | None,
        clip: float | None,
        average: float | None,
        param_dtype: torch.dtype | None,
        microbatches: int,
    ) -> None:
        super().__init__()
        check_count(microbatches)
        self.model, self.optimizers, self.loss = model, optimizers, loss
        self.clip, self.decay, self.param_dtype = clip, average, param_dtype
        self.microbatches = microbatches
        self.names = _names_of(model, optimizers)  # parameter names by optimizer and group
        self.rules = [rule_of(optimizer) for optimizer in optimizers]
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.register_buffer("steps", torch.zeros((), dtype=torch.float32, device=device))
        self.states: dict[str, list[str]] = {}  # parameter -> names of its states
        # What else an optimizer's own step keeps: numbers, lists, and what a first step creates.
        self.kept: dict[str, dict[Any, Any]] = {}
        self.common: list[dict[Any, Any]] = [{} for _ in optimizers]  # of no parameter
        self.counted: list[FirstStates | None] = []  # by optimizer, for those with their own step
        self.loaded: set[int] = set()  # the optimizers whose state_dict waits for the step's
        for optimizer, rule, names in zip(optimizers, self.rules, self.names):
            first = first_states(optimizer) if rule is None else None
            self.counted.append(first and first._replace(states={}))
            own = first.states if first else {}
            for group, of_group in zip(optimizer.param_groups, names):
                for name in of_group:
                    parameter = tensor_of(model, name)
                    if rule is not None:
                        self._add_states(name, rule.states(parameter, group))
                        continue
                    tensors = {k: t for k, t in own[parameter].items() if isinstance(t, Tensor)}
                    self.kept[name] = {
                        kind: state for kind, state in own[parameter].items() if kind not in tensors
                    }
                    self._add_states(name, {k: precise(t) for k, t in tensors.items()})
        self._adopt()
        for optimizer in optimizers:
            # torch's schedulers warn unless the optimizer has stepped.
            vars(optimizer)["_opt_called"] = True
            # load_state_dict makes new tensors; the program knows the buffers.
            optimizer.register_load_state_dict_post_hook(self._has_loaded)
            optimizer.register_state_dict_pre_hook(lambda _: self._publish())
        if None in self.rules:
            self.register_state_dict_post_hook(save_counts)
            self.register_load_state_dict_pre_hook(load_counts)

    def _groups(self) -> Iterator[tuple[Optimizer, Rule | None, dict[str, Any], list[str]]]:
        """Yield each group with its optimizer, the optimizer's row, and the parameters' names."""
        for optimizer, rule, names in zip(self.optimizers, self.rules, self.names):
            for group, of_group in zip(optimizer.param_groups, names):
                yield optimizer, rule, group, of_group

    def _add_states(self, name: str, states: dict[str, Tensor]) -> None:
        parameter = tensor_of(self.model, name)
        self.states[name] = [*states]
        if self.decay is not None:
            states["average"] = parameter.detach().clone()
        for kind, state in states.items():
            follow_mark(state, parameter)
            _put(self, f"{kind}.{name}", state)

    @torch.no_grad()
    def _adopt(self) -> None:
        """Take over the states that the optimizer has, and give it the buffers in their place."""
        for optimizer, rule, _, names in self._groups():
            for name in names:
                state = optimizer.state[tensor_of(self.model, name)]
                keys = {kind: f"{kind}.{name}" for kind in self.states[name]}
                for kind, key in {**keys, **({"step": "steps"} if rule else {})}.items():
                    buffer, present = tensor_of(self, key), state.get(kind)
                    if isinstance(present, Tensor) and present is not buffer:
                        buffer.copy_(present)
                    state[kind] = buffer
                if rule is None:
                    self.kept[name] |= {k: value for k, value in state.items() if k not in keys}
        self._publish()

    def _has_loaded(self, optimizer: Optimizer) -> None:
        self.loaded.add(id(optimizer))
        self._adopt()

    def _publish(self) -> None:
        """Give the optimizers what their own steps keep beside the buffers."""
        for optimizer, rule, _, names in self._groups():
            for name in names if rule is None else ():
                optimizer.state[tensor_of(self.model, name)].update(self.kept[name])

    def forward(self, *args: object, **kwargs: object) -> Any:
        names = [name for *_, of_group in self._groups() for name in of_group]
        parameters = [tensor_of(self.model, name) for name in names]

        def differentiate(model: Callable[..., object]) -> tuple[Any, Sequence[Tensor | None]]:
            outputs = self._outputs(model)(*args, **kwargs)
            loss = outputs[0] if isinstance(outputs, Sequence) else outputs
            # A parameter that the loss does not depend on has no gradient, and is not updated.
            return outputs, torch.autograd.grad(loss, parameters, allow_unused=True)

        with torch.enable_grad():
            if self.param_dtype is None:
                outputs, gradients = differentiate(self.model)
            else:
                outputs, gradients = _in_dtype(self.model, self.param_dtype, differentiate)
        with torch.no_grad():
            self._update(dict(zip(names, gradients)))
        if isinstance(outputs, Sequence):
            return tuple(o.detach() if isinstance(o, Tensor) else o for o in outputs)
        return outputs.detach()

    def _outputs(self, model: Callable[..., object]) -> Callable[..., Any]:
        """Return the function from a batch to the loss."""
        of_batch = model if self.loss is None else partial(self.loss, model)
        if self.microbatches == 1:
            return of_batch
        return Microbatches(of_batch, self.microbatches, self.model)

    @compiling()
    def _update(self, gradients: Mapping[str, Tensor | None]) -> None:
        # One norm over all groups, as clip_grad_norm_ on model.parameters().
        scale = _clip_scale([g for g in gradients.values() if g is not None], self.clip)
        self.steps.add_(1)
        clipped = {
            name: g if g is None or scale is None else g * scale.to(g.dtype)
            for name, g in gradients.items()
        }
        for i, rule in enumerate(self.rules):
            if rule is None:
                self._step_itself(i, clipped)
        for _, rule, group, names in self._groups():
            trained = {name: g for name in names if (g := clipped[name]) is not None}
            if rule is not None:
                rule.update(
                    [tensor_of(self.model, name) for name in trained],
                    [*trained.values()],
                    [self._states_of(name) for name in trained],
                    tensor_of(self, "steps"),
                    group,
                )
            if self.decay is not None:
                for name in names:
                    average = tensor_of(self, f"average.{name}")
                    average.lerp_(tensor_of(self.model, name), 1 - self.decay)

    def _states_of(self, name: str) -> dict[str, Tensor]:
        return {kind: tensor_of(self, f"{kind}.{name}") for kind in self.states[name]}

    def _step_itself(self, i: int, gradients: Mapping[str, Tensor | None]) -> None:
        """Run an optimizer's own step on its parameters, and keep its states."""
        names = {name: tensor_of(self.model, name) for each in self.names[i] for name in each}
        now = run_step(
            self.optimizers[i],
            [([names[n] for n in each], [gradients[n] for n in each]) for each in self.names[i]],
            {names[name]: self.kept[name] | self._states_of(name) for name in names}
            | self.common[i],
        )
        for name, parameter in names.items():
            state, buffers = now.pop(parameter), self._states_of(name)
            for kind, buffer in buffers.items():
                if (value := state.pop(kind, None)) is not buffer:
                    _check_state(self.optimizers[i], kind, name, buffer, value)
                    buffer.copy_(value)
            _replace(self.kept[name], state)
        _replace(self.common[i], now)


def train_step(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loss: Callable[..., object] | None = None,
    *,
    clip: float | None = None,
    average: float | None = None,
    param_dtype: torch.dtype | None = None,
    microbatches: int = 1,
) -> TrainStep:
    """Return a module whose call is a whole training step: forward, backward and update.

    It is plain PyTorch, for one device; `parallelize` and `plan` make it one program. The
    optimizer's states have their parameters' layouts, with `shard_updates` too, and stay the
    optimizer's. Its learning rate may change between steps, and its state_dict is as usual.

    Args:
        model: The model, before `parallelize`.
        optimizer: torch.optim's AdamW, Adam, SGD or Adafactor, for the model's parameters. For any
            other, its own `step` is in the program, which may compute with tensors only. Several,
            as Muon for matrices and AdamW for the rest, each for some of the parameters.
        loss: A function that takes the model and the batch, and returns the loss, or a tuple that
            begins with it. By default the model returns it.
        clip: The largest norm for all gradients together.
        average: The decay for the weights' exponential moving averages, the buffers "average.*".
        param_dtype: The dtype in which the model computes, such as torch.bfloat16. Weights, their
            gradients, updates and averages stay in their own.
        microbatches: Parts that the batch is divided into. Forward and backward run for one after
            the other, and gradients are reduced once. The loss is the mean of the parts' losses.

    Returns:
        The module. Its arguments are the batch; it returns `loss`'s result, detached.

    Raises:
        ShardingError: An optimizer has a parameter that is not the model's, or that another has.

    Example:
        >>> import torch
        >>> from torchgspmd import Mesh, plan, train_step
        >>> model = torch.nn.Linear(8, 8, bias=False)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> step = train_step(model, optimizer, lambda model, x: model(x).square().mean())
        >>> weight = mark_sharding(model.weight, Mesh(data=4), "data _")
        >>> result = plan(step, torch.ones(1024, 8), mesh=Mesh(data=4), in_specs="data _")
        >>> [c.kind for c in result.collectives]
        ['all_gather', 'reduce_scatter', 'all_reduce']
    """
    optimizers = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
    return TrainStep(model, optimizers, loss, clip, average, param_dtype, microbatches)


def _names_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[list[list[str]]]:
    """Return the names of the trained parameters, by optimizer and group."""
    known, seen = {id(p): name for name, p in model.named_parameters()}, set[int]()
    for parameter in (p for o in optimizers for g in o.param_groups for p in g["params"]):
        if id(parameter) not in known:
            raise ShardingError.here(
                f"the optimizer has a parameter of shape {list(parameter.shape)} that is not "
                "the model's",
                fix="call train_step(model, AdamW(model.parameters()), loss)",
            )
        if id(parameter) in seen:
            raise ShardingError.here(
                f"two optimizers have the parameter '{known[id(parameter)]}'",
                fix="give each parameter to one optimizer: Muon(matrices), AdamW(others)",
            )
        seen.add(id(parameter))
    return [
        [[known[id(p)] for p in g["params"] if p.requires_grad] for g in optimizer.param_groups]
        for optimizer in optimizers
    ]


def _in_dtype(model: nn.Module, dtype: torch.dtype, run: Callable[..., object]) -> Any:
    """Call a function of the model, which computes with copies in a dtype.

    Floating parameters and arguments are copied. The backward is in `run`: recomputed operations
    have to see the copies, too.
    """

    def cast(value: Any) -> Any:
        is_floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_floating else value

    def call(*args: object, **kwargs: object) -> Any:
        return model(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})

    copies = {name: cast(p) for name, p in model.named_parameters()}
    return with_tensors(model, copies, lambda: run(call))


def _clip_scale(gradients: list[Tensor], clip: float | None) -> Tensor | None:
    """Return the factor that brings the gradients' norm to at most `clip`."""
    if clip is None or not gradients:
        return None
    # Narrow dtypes are squared in float32: float16 overflows at 256 squared.
    squares = torch.stack(
        [g.float().square().sum() if g.dtype.itemsize < 4 else g.square().sum() for g in gradients]
    )
    # 1e-6 as in torch.nn.utils.clip_grad_norm_.
    return (clip / (squares.sum().sqrt() + 1e-6)).clamp_max(1.0)


def _replace(table: dict[Any, Any], entries: Mapping[Any, Any]) -> None:
    """Set a table's entries, and write only those that differ."""
    for key in [key for key in table if key not in entries]:
        del table[key]
    table.update({k: value for k, value in entries.items() if table.get(k, table) is not value})


def _check_state(
    optimizer: Optimizer, kind: object, name: str, buffer: Tensor, value: object
) -> None:
    """Raise ShardingError if a state is no longer a tensor as its buffer is."""
    form = (value.dtype, [*value.shape]) if isinstance(value, Tensor) else (type(value),)
    if form != (buffer.dtype, [*buffer.shape]):
        raise ShardingError.here(
            f"the state '{kind}' of '{name}' begins as {buffer.dtype} {[*buffer.shape]}, and "
            f"{type(optimizer).__name__}.step replaces it by {' '.join(map(str, form))}",
            why="a state is a buffer of the step, with its dtype and shape",
            fix="create the state in the dtype and shape that it keeps",
        )


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Register a buffer under a dotted name."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]  # pyright: ignore[reportAssignmentType]
    module.register_buffer(last, tensor)


def tensor_of(module: nn.Module, name: str) -> Tensor:
    """Return the parameter or buffer with a dotted name, or its stand-in in a trace."""
    path, _, last = name.rpartition(".")
    return getattr(module.get_submodule(path), last)
