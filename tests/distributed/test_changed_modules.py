"""Whatever changes a wrapped model after its first call counts in the next one, as on one device.

Each change runs on a wrapped model and on a plain one, after a step of training. Then their
results, gradients and buffers are the same; or the change, or the call after it, is a ShardingError
that names it.
"""

from __future__ import annotations

import copy
import io
import pickle
import types

import pytest
import torch
from helpers import assert_same
from ranks import distributed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import swa_utils

import torchgspmd as gspmd

TERMS = 4096  # some layers with 8 to 16 terms, and two norms, for up to four steps
MARKS = {
    "up.weight": "model _",
    "up.bias": "model",
    "down.weight": "_ model",
    "block.fc.weight": "model _",
    "bn.weight": "model",
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.gain = nn.Linear(8, 8), nn.LayerNorm(8), 1.5

    def forward(self, x, *, shift=0.0):
        return self.norm(torch.tanh(self.fc(x))) * self.gain + shift


class Other(Block):
    def forward(self, x, **kwargs):
        return self.fc(x) * 7


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.block = nn.Linear(8, 16), nn.Linear(16, 8), Block()
        self.act, self.drop, self.bn = nn.ReLU(), nn.Dropout(0.0), nn.BatchNorm1d(8)
        self.register_buffer("angles", torch.arange(8.0))
        self.scale, self.extras, self.table = 1.0, [], {"a": 1.0}

    def forward(self, x, scale=1.0):
        # No layer stands before the norm, which would make its gradients rounding alone.
        y = self.down(self.drop(self.act(self.up(self.bn(x) * scale)))) + self.angles
        y = self.block(y, shift=0.5) * self.scale
        return sum(self.extras, y) * self.table["a"]


class Triangle(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).T


class Twice(nn.Module):
    def forward(self, w):
        return 2 * w

    def right_inverse(self, w):
        return w / 2


def batch(seed: int = 3) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(tree):
    """Return copies of plain tensors."""
    return torch.utils._pytree.tree_map_only(
        Tensor, lambda t: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone(), tree
    )


def step(module: nn.Module) -> list:
    """Return results and gradients of a call, and buffers."""
    torch.manual_seed(7)
    module.zero_grad()
    dtype = next(module.parameters()).dtype
    x = batch().to(dtype).requires_grad_()
    y = module(x)
    (y * batch(9).to(dtype)).sum().backward()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    return whole([y, x.grad, grads, [*module.buffers()]])


def like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return a value, laid out as a parameter."""
    value = value.to(parameter.dtype)
    if not isinstance(parameter, DTensor):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def twice(module: nn.Module, inputs, result):
    return result * 2


def between(module: nn.Module, change, undo) -> None:
    change(module)
    step(module)
    undo(module)


def averaged(module: nn.Module, **options) -> nn.Module:
    """Return the average of three steps' weights."""
    average, optimizer = swa_utils.AveragedModel(module, **options), torch.optim.SGD
    optimizer = optimizer(module.parameters(), 0.1)
    for _ in range(3):
        step(module)
        optimizer.step()
        average.update_parameters(module)
    return average


def called_with(module: nn.Module, factor: float, detached: bool) -> list:
    """Return the gradients of a functional_call with other parameters."""
    given = {n: p.detach() if detached else p for n, p in module.named_parameters()}
    given = {n: p * factor for n, p in given.items()}
    for each in given.values() if detached else ():
        each.requires_grad_()
    module.zero_grad()
    (torch.func.functional_call(module, given, (batch(),)) * batch(9)).sum().backward()
    return [p.grad for p in (given.values() if detached else module.parameters())]


def clipped(module: nn.Module, **options) -> list:
    step(module)
    norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1, **options)
    return [norm, [p.grad for p in module.parameters()]]


def without_grad(change):
    """Return the change under no_grad, without a result."""

    def changed(module: nn.Module) -> None:
        with torch.no_grad():
            change(module)

    return changed


def loaded(module: nn.Module, wrap=lambda m: m, **options) -> nn.Module:
    module = wrap(module)
    state = {k: like(v, whole(v) * 2) for k, v in module.state_dict().items()}
    module.load_state_dict(state, **options)
    return module


def with_hook_of_all(module: nn.Module) -> list:
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, _, result: result * 2 if isinstance(m, Block) else None
    )
    try:
        return step(module)
    finally:
        handle.remove()


def of_all_weights(module: nn.Module) -> list:
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(vector * 2, module.parameters())
    return [vector]


def observed(module: nn.Module, register) -> list:
    kept: list = []
    register(module, kept)
    step(module)
    return kept


# A change returns nothing, another module to look at, or a list of results.
CHANGES = {
    # copies
    "deepcopy": copy.deepcopy,
    "deepcopy is apart": lambda m: [p.data.mul_(2) for p in copy.deepcopy(m).parameters()][:0],
    "deepcopy of a submodule": lambda m: [copy.deepcopy(m.block)(batch())],
    "in another module": lambda m: nn.Sequential(m, nn.Tanh()),
    "torch.compile": lambda m: torch.compile(m, backend="eager"),
    "swa": averaged,
    "ema": lambda m: averaged(m, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
    "ema of buffers": lambda m: averaged(m, use_buffers=True),
    # modes
    "eval": lambda m: m.eval(),
    "eval of a submodule": lambda m: m.bn.eval() and None,
    "training as an attribute": lambda m: setattr(m.bn, "training", False),
    "eval and train": lambda m: between(m, nn.Module.eval, nn.Module.train),
    "momentum": lambda m: setattr(m.bn, "momentum", 0.9),
    "requires_grad_": lambda m: m.requires_grad_(False).up.requires_grad_(True) and None,
    "requires_grad": lambda m: setattr(m.up.weight, "requires_grad", False),
    "double": lambda m: m.double(),
    "float, and back": lambda m: between(m, nn.Module.float, nn.Module.double),
    # hooks
    "hook with kwargs": lambda m: (
        m.block.register_forward_hook(
            lambda _, args, kwargs, result: result * 2 + kwargs["shift"], with_kwargs=True
        )
        and None
    ),
    "pre-hook with kwargs": lambda m: (
        m.block.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {"shift": kwargs["shift"] * 3}), with_kwargs=True
        )
        and None
    ),
    "own hook with kwargs": lambda m: (
        m.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {"scale": 3.0}), with_kwargs=True
        )
        and None
    ),
    "hook removed": lambda m: between(
        m,
        lambda m: setattr(m, "handle", m.block.register_forward_hook(twice)),
        lambda m: m.handle.remove(),
    ),
    "hook before another": lambda m: between(
        m,
        lambda m: m.block.register_forward_hook(twice),
        lambda m: m.block.register_forward_hook(lambda _, x, y: y + 1, prepend=True),
    ),
    "backward hook": lambda m: (
        m.block.register_full_backward_hook(lambda _, inputs, outputs: tuple(g * 2 for g in inputs))
        and None
    ),
    "hook of all modules": with_hook_of_all,
    "hook that keeps": lambda m: observed(
        m, lambda m, kept: m.block.register_forward_hook(lambda _, x, y: kept.append(y.detach()))
    ),
    "hook of a parameter": lambda m: m.up.weight.register_hook(lambda g: g * 2) and None,
    "hook of a gradient": lambda m: observed(
        m,
        lambda m, kept: m.up.weight.register_post_accumulate_grad_hook(
            lambda p: kept.append(whole(p.grad))
        ),
    ),
    "hook of state_dict": lambda m: [
        m.register_state_dict_post_hook(lambda _, state, *rest: state.__delitem__("angles")),
        [*m.state_dict().values()],
    ][1:],
    # parameters
    "parametrized": lambda m: (
        parametrize.register_parametrization(m.block.fc, "weight", Triangle()) and None
    ),
    "parametrized, and removed": lambda m: between(
        m,
        lambda m: parametrize.register_parametrization(m.up, "weight", Twice()),
        lambda m: parametrize.remove_parametrizations(m.up, "weight"),
    ),
    "orthogonal": lambda m: parametrizations.orthogonal(m.block.fc) and None,
    "weight_norm": lambda m: parametrizations.weight_norm(m.up) and None,
    "weight_norm by hooks": lambda m: nn.utils.weight_norm(m.up) and None,
    "spectral_norm": lambda m: [torch.manual_seed(5), parametrizations.spectral_norm(m.up)][:0],
    "spectral_norm by hooks": lambda m: [torch.manual_seed(5), nn.utils.spectral_norm(m.up)][:0],
    "pruned": lambda m: prune.l1_unstructured(m.up, "weight", amount=0.3) and None,
    "pruned for good": lambda m: between(
        m,
        lambda m: prune.l1_unstructured(m.up, "weight", amount=0.3),
        lambda m: prune.remove(m.up, "weight"),
    ),
    "functional_call": lambda m: called_with(m, 2.0, detached=True),
    "functional_call of what follows": lambda m: called_with(m, 3.0, detached=False),
    "another parameter": lambda m: setattr(
        m.up, "weight", nn.Parameter(like(m.up.weight, torch.ones(16, 8)))
    ),
    "swap_tensors": lambda m: torch.utils.swap_tensors(
        m.up.weight, nn.Parameter(like(m.up.weight, torch.ones(16, 8)))
    ),
    "tied": lambda m: setattr(m.bn, "weight", m.block.norm.weight),
    "data of a parameter": lambda m: setattr(
        m.up.weight, "data", like(m.up.weight, torch.ones(16, 8))
    ),
    "plain data": lambda m: setattr(m.up.weight, "data", torch.ones(16, 8, dtype=torch.float64)),
    "rows in place": without_grad(lambda m: m.up.weight.data[1:3].fill_(7)),
    "all in place": without_grad(lambda m: torch._foreach_mul_([*m.parameters()], 2.0)),
    "as a vector": of_all_weights,
    "no bias": lambda m: setattr(m.up, "bias", None),
    "initialized": lambda m: [
        torch.manual_seed(4),
        nn.init.kaiming_normal_(m.down.weight),
        m.up.reset_parameters(),
    ][:0],
    "loaded": loaded,
    "loaded by assignment": lambda m: loaded(m, assign=True),
    "loaded around": lambda m: loaded(m, nn.Sequential),
    # buffers and attributes
    "buffer in place": lambda m: m.angles.mul_(3) is None or None,
    "a buffer's row": lambda m: m.angles.__setitem__(2, 100.0),
    "another buffer": lambda m: setattr(m, "angles", torch.ones(8, dtype=torch.float64) * 4),
    "a buffer of another shape": lambda m: setattr(m, "angles", torch.ones(1).double()),
    "a buffer more": lambda m: m.register_buffer("more", torch.ones(3).double()),
    "statistics": lambda m: m.bn.reset_running_stats(),
    "number": lambda m: setattr(m, "scale", 3.0),
    "number of a submodule": lambda m: setattr(m.block, "gain", 4.0),
    "tensor for a number": lambda m: setattr(m, "scale", torch.tensor(3.0).double()),
    "in a dict": lambda m: m.table.update(a=9.0),
    "in a list": lambda m: m.extras.append(torch.ones(8).double()),
    "a parameter in a list": lambda m: m.extras.append(nn.Parameter(torch.ones(8).double())),
    "in a list, in place": lambda m: between(
        m,
        lambda m: m.extras.append(torch.ones(8).double()),
        lambda m: m.extras[0].mul_(3),
    ),
    # modules and methods
    "another module": lambda m: setattr(m, "act", nn.GELU()),
    "a module more": lambda m: m.add_module("unused", nn.ReLU()),
    "another class": lambda m: setattr(m.block, "__class__", Other),
    "forward": lambda m: setattr(
        m, "forward", lambda x, old=m.forward, scale=1.0: old(x, scale) * 2
    ),
    "forward of a submodule": lambda m: setattr(
        m.block, "forward", types.MethodType(lambda self, x, **_: self.fc(x), m.block)
    ),
    # gradients
    "clipped": clipped,
    "clipped by the largest": lambda m: clipped(m, norm_type=float("inf")),
    "clipped as a list": lambda m: clipped(m, foreach=True),
    "a gradient's total": lambda m: [
        step(m),
        nn.utils.get_total_norm([p.grad for p in m.parameters()]),
    ],
    "halved gradients": lambda m: [
        step(m),
        [p.grad.mul_(0.5) for p in m.parameters()],
        m(batch()).sum().backward(),
        [p.grad for p in m.parameters()],
    ][3:],
    "a penalty on weights": lambda m: [
        m.zero_grad(),
        (m(batch()) * batch(9)).sum().add(sum(p.square().sum() for p in m.parameters())).backward(),
        [p.grad for p in m.parameters()],
    ][2:],
}
REFUSED = {
    "pickle": (lambda m: pickle.dumps(m), "a module on a mesh cannot be pickled"),
    "torch.save": (lambda m: torch.save(m, io.BytesIO()), "a module on a mesh cannot be pickled"),
    "copy": (copy.copy, "nor copied by copy.copy"),
    "a submodule pickled": (lambda m: pickle.dumps(m.block), "one process saves or pickles"),
    "a plain parameter": (
        lambda m: setattr(m.up, "weight", nn.Parameter(torch.ones(16, 8))),
        "parameter 'up.weight' is a plain tensor",
    ),
    "a parameter more": (
        lambda m: m.register_parameter("more", nn.Parameter(torch.ones(8))),
        "parameter 'more' is a plain tensor",
    ),
    "a layer more": (
        lambda m: m.add_module("more", nn.Linear(3, 3)),
        "parameter 'more.weight' is a plain tensor",
    ),
    "a parameter in a default": (
        lambda m: m.block.register_forward_hook(
            lambda m, x, y, scale=nn.Parameter(torch.ones(8).double()): y * scale
        ),
        "requires a gradient, and is no parameter, argument",
    ),
    "data of another dtype": (
        lambda m: setattr(m.up.weight, "data", torch.ones(16, 8)),
        "the data of a DTensor, torch.float64 of shape",
    ),
    "compile": (lambda m: m.compile(), "a module on a mesh is compiled by its backend"),
    "torch.func": (lambda m: torch.func.vmap(m)(batch()[:, None]), "torch.func transforms"),
    "torch.export": (
        lambda m: torch.export.export(m, (batch(),)),
        "torch.export exports a module on a mesh",
    ),
    "a gradient's gradient": (
        lambda m: (
            torch.autograd.grad(
                m(x := batch().requires_grad_()).square().sum(), x, create_graph=True
            )[0]
            .sum()
            .backward()
        ),
        "a gradient of a sharded module is differentiated again",
    ),
}


def both(mesh: gspmd.Mesh) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    alone = Model().double()
    model = gspmd.parallelize(gspmd.annotate(copy.deepcopy(alone), mesh, MARKS), mesh)
    step(model), step(alone)
    return model, alone


def after(change, module: nn.Module) -> list:
    result = change(module)
    found = whole(result) if isinstance(result, list) else []
    return found + step(result if isinstance(result, nn.Module) else module)


@distributed("model=2")
@pytest.mark.parametrize("name", CHANGES)
def test_change(mesh, name):
    model, alone = both(mesh)
    want = after(CHANGES[name], alone)
    assert_same(after(CHANGES[name], model), want, name, TERMS)


@distributed("model=2")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_change(mesh, name):
    change, message = REFUSED[name]
    model, _ = both(mesh)
    with pytest.raises(gspmd.ShardingError, match=message):
        after(change, model)
