"""What stands between backward and forward in a training loop, against one process: optimizers,
clipping, averages and scalers, for all layouts that may meet in one list.
"""

import copy
import itertools
import math
from unittest.mock import patch

import pytest
import torch
from ranks import distributed
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import torchgspmd as gspmd
from torchgspmd.dtensor.ours import groups_of_ours

MESHES = ("data=2", "model=3", "data=2,model=2")
SHAPES = {
    "rows": (7, 6),
    "columns": (6, 5),
    "both": (8, 4),
    "few": (1, 3),
    "vector": (5,),
    "one": (),
}
LISTS = {"one by one": {"foreach": False}, "lists": {"foreach": True}}
FUSED = {**LISTS, "fused": {"fused": True}}
RATE = {"lr": 0.05}
DECAY = {**RATE, "weight_decay": 0.1}
KINDS = {
    torch.optim.Adadelta: (LISTS, [RATE, {**DECAY, "maximize": True}]),
    torch.optim.Adagrad: (FUSED, [RATE, {**DECAY, "initial_accumulator_value": 0.1}]),
    torch.optim.Adam: (FUSED, [RATE, {**DECAY, "amsgrad": True}, {"lr": torch.tensor(0.05)}]),
    torch.optim.AdamW: (FUSED, [DECAY, {**DECAY, "amsgrad": True, "maximize": True}]),
    torch.optim.Adamax: (LISTS, [DECAY]),
    torch.optim.ASGD: (LISTS, [DECAY]),
    torch.optim.NAdam: (LISTS, [{**DECAY, "decoupled_weight_decay": True}]),
    torch.optim.RAdam: (LISTS, [DECAY]),
    # eps: the difference of two averages, of which a root is taken, may round to nothing.
    torch.optim.RMSprop: (
        LISTS,
        [{**DECAY, "momentum": 0.9}, {**DECAY, "centered": True, "eps": 1}],
    ),
    torch.optim.Rprop: (LISTS, [RATE]),
    torch.optim.SGD: (
        FUSED,
        [RATE, {**DECAY, "momentum": 0.9, "nesterov": True}, {"lr": torch.tensor(0.1)}],
    ),
}


class Weights(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape).to(dtype)))
        self.register_buffer("mean", torch.zeros(7, dtype=dtype))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self):
        return sum(p.square().sum() for p in self.parameters())


def models(mesh, dtype=torch.float32) -> tuple[nn.Module, nn.Module]:
    """(on the mesh, on one device): each with a plain module beside it."""
    torch.manual_seed(3)
    reference, beside = Weights(dtype), nn.Linear(3, 2, dtype=dtype)
    first, last = mesh.names[0], mesh.names[-1]
    marks = {
        "rows": f"{first} _",
        "columns": f"_ {last}",
        "few": f"{last} _",
        "vector": first,
        "mean": last,
    }
    marks["both"] = f"{first} {last}" if first != last else f"{first} _"
    model = gspmd.parallelize(gspmd.annotate(copy.deepcopy(reference), mesh, marks), mesh)
    return nn.ModuleList([model, copy.deepcopy(beside)]), nn.ModuleList([reference, beside])


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def laid_out(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return values.clone()
    # A copy: a replicated DTensor shares memory.
    return distribute_tensor(values.clone(), like.device_mesh, like.placements, src_data_rank=None)


def set_gradients(model: nn.Module, reference: nn.Module, step: int, missing: str = "") -> None:
    torch.manual_seed(100 + step)
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters()):
        theirs.grad = torch.randn(theirs.shape).to(theirs.dtype)
        mine.grad = laid_out(theirs.grad, mine)
        if missing and missing in name:
            mine.grad = theirs.grad = None


def same(mine, theirs) -> None:
    """Elements are computed alike, but vectorized code rounds otherwise than that of a rest."""
    if not isinstance(theirs, torch.Tensor):
        assert mine == theirs
        return
    tolerance = 64 * torch.finfo(theirs.dtype).eps if theirs.is_floating_point() else 0
    torch.testing.assert_close(
        whole(mine.detach()), theirs.detach(), rtol=tolerance, atol=tolerance
    )


def same_models(model: nn.Module, reference: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), reference.parameters()):
        same(mine, theirs)
    for mine, theirs in zip(model.buffers(), reference.buffers()):
        same(mine, theirs)


def same_states(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    pairs = zip(*(group["params"] for o in (ours, theirs) for group in o.param_groups))
    for mine, other in pairs:
        states = ours.state[mine], theirs.state[other]
        assert states[0].keys() == states[1].keys()
        for name, state in states[0].items():
            same(state, states[1][name])
            if isinstance(mine, DTensor) and isinstance(state, torch.Tensor) and state.dim():
                assert type(state) is DTensor and state.placements == mine.placements, name
                assert state._local_tensor.shape == mine._local_tensor.shape


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@distributed(*MESHES)
def test_update_rules(mesh, kind):
    """All of torch.optim that update element by element, with a parameter that has no gradient at
    first, one without rows on some ranks, and plain ones in the same list.
    """
    ways, flags = KINDS[kind]
    both = [{**way, **flag} for way in ways.values() for flag in flags]
    # Lists take no tensor as a rate.
    options = [o for o in both if not (o.get("foreach") and torch.is_tensor(o["lr"]))]
    for option, dtype in itertools.product(options, (torch.float32, torch.bfloat16)):
        # torch's fused SGD for bfloat16 computes vectors and the rest otherwise (on one device
        # too): with momentum they differ by more than they are.
        if dtype is torch.bfloat16 and "fused" in option and "momentum" in option:
            continue
        try:
            compare_steps(mesh, kind, option, dtype)
        except Exception as error:
            error.add_note(f"{option}, {dtype}")
            raise


def compare_steps(mesh, kind, options, dtype) -> None:
    model, reference = models(mesh, dtype)
    optimizers = [kind(m.parameters(), **copy.deepcopy(options)) for m in (model, reference)]
    versions = [p._version for p in model.parameters()]
    for step in range(3):
        # torch's fused SGD wants all buffers from the first step on, or none.
        missing = "rows" if step == int("fused" in options) else ""
        set_gradients(model, reference, step, missing)
        for optimizer in optimizers:
            optimizer.step()
    same_models(model, reference)
    same_states(*optimizers)
    after = [p._version for p in model.parameters()]
    assert all(a > b for a, b in zip(after, versions)), "autograd has to see a change"


def step_on(optimizer, model, reference, step) -> None:
    set_gradients(model, reference, step)
    for each in optimizer:
        each.step()


@distributed(*MESHES)
def test_states_in_the_user_s_hands(mesh):
    """Hooks, closures, schedules and state_dict meet DTensors, and so does who catches an error."""
    for options in FUSED.values():
        model, reference = models(mesh)
        optimizers = [torch.optim.AdamW(m.parameters(), 0.1, **options) for m in (model, reference)]
        schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
        seen = []

        def look(optimizer, *_, seen=seen):
            states = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            seen.append([type(t) for t in (*parameters, *(p.grad for p in parameters), *states)])

        optimizers[0].register_step_pre_hook(look)
        optimizers[0].register_step_post_hook(look)
        step_on(optimizers, model, reference, 0)
        step_on(optimizers, model, reference, 1)
        assert len(seen) == 4 and all(DTensor in types for types in seen), seen
        assert seen[2] == seen[3]
        for each in schedules:
            each.step()
        for optimizer, m in zip(optimizers, (model, reference)):
            optimizer.step(lambda m=m: sum(p.grad.square().sum() for p in m.parameters()))
        same_models(model, reference)
        # States go on where they were, those of one device too.
        saved = [copy.deepcopy(o.state_dict()) for o in optimizers]
        for state in saved:
            again = torch.optim.AdamW(model.parameters(), 0.1, **options)
            before = [p.detach().clone() for p in model.parameters()]
            again.load_state_dict(copy.deepcopy(state))
            other = torch.optim.AdamW(reference.parameters(), 0.1, **options)
            other.load_state_dict(copy.deepcopy(saved[1]))
            kept = copy.deepcopy([*reference.parameters()])
            step_on((again, other), model, reference, 3)
            same_models(model, reference)
            same_states(again, other)
            with torch.no_grad():
                for p, value in (
                    *zip(model.parameters(), before),
                    *zip(reference.parameters(), kept),
                ):
                    p.copy_(value)


@distributed("data=2,model=2")
def test_an_error_in_a_step(mesh):
    """Leaves DTensors, and what it had changed until then, as on one device."""
    model, reference = models(mesh)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, reference)]
    step_on(optimizers, model, reference, 0)
    set_gradients(model, reference, 1)
    error = RuntimeError("in the middle")
    calls = []

    def add(method, self, *args, **kwargs):
        calls.append(self)
        if len(calls) == 6:
            raise error
        return method(self, *args, **kwargs)

    for optimizer in optimizers:
        calls.clear()
        with patch.object(torch.Tensor, "add_", partialmethod_of(add, torch.Tensor.add_)):
            try:
                optimizer.step()
            except RuntimeError as raised:
                assert raised is error
    assert len(calls) == 6
    same_models(model, reference)
    same_states(*optimizers)
    step_on(optimizers, model, reference, 2)
    same_models(model, reference)
    same_states(*optimizers)


def partialmethod_of(function, method):
    return lambda self, *args, **kwargs: function(method, self, *args, **kwargs)


@distributed("data=2,model=2")
def test_gradients_with_other_layouts(mesh):
    """A gradient that the user has replicated, and one of plain values, are the whole one's."""
    for options in LISTS.values():
        model, reference = models(mesh)
        optimizers = [torch.optim.Adam(m.parameters(), 0.1, **options) for m in (model, reference)]
        for step in range(3):
            set_gradients(model, reference, step)
            if step == 1:
                rows, like = model[0].rows, reference.get_parameter("0.rows").grad
                rows.grad = distribute_tensor(
                    like.clone(), rows.device_mesh, [Replicate()] * len(mesh.names)
                )
            for optimizer in optimizers:
                optimizer.step()
        same_models(model, reference)
        same_states(*optimizers)


@distributed("data=2,model=2")
def test_differentiable_steps(mesh):
    """differentiable=True: a step that autograd records, of DTensors."""
    found = []
    for m in models(mesh):
        weight = m[0].rows.detach().clone().requires_grad_()
        moved = weight.clone()
        optimizer = torch.optim.SGD([moved], 0.1, differentiable=True)
        moved.grad = weight * 2
        optimizer.step()
        moved.square().sum().backward()
        found.append(whole(weight.grad))
    same(*found)


@distributed(*MESHES)
def test_norms_and_clipping(mesh):
    for dtype, foreach, order in itertools.product(
        (torch.float32, torch.bfloat16), (None, True, False), (2.0, 1, 0.5, 3, math.inf)
    ):
        model, reference = models(mesh, dtype)
        set_gradients(model, reference, 0, "vector")
        totals = [
            nn.utils.clip_grad_norm_(m.parameters(), 0.5, order, foreach=foreach)
            for m in (model, reference)
        ]
        rounded = 64 * torch.finfo(dtype).eps  # a norm in bfloat16 is rounded before it is used
        torch.testing.assert_close(whole(totals[0]), totals[1], rtol=rounded, atol=0)
        compare_gradients(model, reference, rounded)
        for m in (model, reference):
            nn.utils.clip_grad_value_(iter(m.parameters()), 0.01, foreach=foreach)
        compare_gradients(model, reference, rounded)
    gradients = [[p.grad for p in m.parameters() if p.grad is not None] for m in (model, reference)]
    for order in (-1.0, 0.0, -math.inf):
        norms = [nn.utils.get_total_norm(g, order) for g in gradients]
        same(*norms)
    same(*(nn.utils.get_total_norm(g[0]) for g in gradients))
    for g in gradients:
        torch._foreach_add_(g, g)
    # Twice as many tensors in one list as in those two.
    same(*(nn.utils.get_total_norm([*g, *g]) for g in gradients))
    model[0].rows.grad[0, 0] = math.inf
    for m in (model, model[0], nn.ParameterList([model[0].rows])):
        try:
            nn.utils.clip_grad_norm_(m.parameters(), 1.0, error_if_nonfinite=True)
        except RuntimeError as error:
            assert "non-finite" in str(error)
        else:
            raise AssertionError("every rank has to see it")


def compare_gradients(model, reference, tolerance) -> None:
    for mine, theirs in zip(model.parameters(), reference.parameters()):
        if theirs.grad is None:
            assert mine.grad is None
        else:
            torch.testing.assert_close(
                whole(mine.grad), theirs.grad, rtol=tolerance, atol=tolerance
            )


@distributed(*MESHES)
def test_scalers(mesh):
    """An infinity in one rank's shard of whichever gradient makes all ranks skip the step."""
    for name in ("", *SHAPES):
        model, reference = models(mesh)
        for m in (model, reference):
            optimizer = torch.optim.SGD(m.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            scaler.scale(torch.ones(()))
            set_gradients(model, reference, 0)
            if name:
                bad = m[0].get_parameter(name)
                values = whole(bad.grad).clone()
                values.view(-1)[-1] = math.inf
                bad.grad = laid_out(values, bad)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (2.0 if name else 4.0), name
        same_models(model, reference)


@distributed(*MESHES)
def test_averages(mesh):
    kinds = [
        {},
        {"multi_avg_fn": get_ema_multi_avg_fn(0.7)},
        {"avg_fn": get_ema_avg_fn(0.7)},
        {"avg_fn": lambda a, b, n: 0.7 * a + 0.3 * b},
        # Not elementwise: the mean of a whole tensor.
        {"avg_fn": lambda a, b, n: 0.7 * a + 0.3 * b.float().mean()},
        {"multi_avg_fn": torch.optim.swa_utils.get_swa_multi_avg_fn()},
    ]
    for options, use_buffers in itertools.product(kinds, (False, True)):
        if use_buffers and "multi_avg_fn" in options:
            continue  # one device refuses a list with a count of calls in it
        model, reference = models(mesh)
        model, reference = model[0], reference[0]
        averages = [
            AveragedModel(m, use_buffers=use_buffers, **options) for m in (model, reference)
        ]
        for step in range(3):
            for average, m in zip(averages, (model, reference)):
                average.update_parameters(m)
            torch.manual_seed(step)
            values = [torch.randn(shape) for shape in SHAPES.values()]
            with torch.no_grad():
                for m in (model, reference):
                    for p, value in zip(m.parameters(), values):
                        p.copy_(laid_out(value, p))
                    m.mean.add_(1)
                    m.count.add_(2)
        same_models(*averages)
        assert averages[0].n_averaged == 3
        pairs = zip(averages[0].module.parameters(), model.parameters())
        assert all(type(a) is DTensor and a.placements == p.placements for a, p in pairs)


LOOPS = {
    "descent": lambda p, g: p.add_(g, alpha=-0.1),
    "in place of an expression": lambda p, g: p.sub_(0.1 * g),
    "data": lambda p, g: p.data.lerp_(g, 0.3),
    "data of an expression": lambda p, g: p.data.add_(-0.1 * g.data),
    "operators": lambda p, g: p.__imul__(0.9).__isub__(g),
    "a rate": lambda p, g: p.mul_(torch.tensor(0.9)).add_(g),
    "quotients": lambda p, g: p.addcdiv_(g, g.square().add_(1.0).sqrt_(), value=-0.1),
    "limits": lambda p, g: p.clamp_(-0.5, 0.5).clamp_(min=g),
    "signs": lambda p, g: p.add_(g.clone().sign_(), alpha=-0.1),
    "masks": lambda p, g: p.masked_fill_(g > 0, 0.5),
    "another dtype": lambda p, g: p.copy_(g.bfloat16()),
    "a norm": lambda p, g: p.div_(g.norm() + 1),
    "a pending norm": lambda p, g: p.mul_(g.norm()),
    "broadcast": lambda p, g: p.add_(g.sum(-1, keepdim=True) if p.dim() else g),
    "rounding": lambda p, g: p.div_(g.abs().add_(1), rounding_mode="floor"),
    "nothing": lambda p, g: p.zero_().add_(1),
    "lists": lambda p, g: torch._foreach_lerp_([p, g], [g, p], 0.3),
    "a list and a rate": lambda p, g: torch._foreach_mul_([p], torch.tensor(0.3)),
    "a list of rates": lambda p, g: torch._foreach_add_([p, g], [0.1, 0.2]),
}


@distributed(*MESHES)
def test_loops_over_parameters(mesh):
    """Updates that users write; an update counts as a change of the DTensor."""
    for name, change in LOOPS.items():
        model, reference = models(mesh)
        set_gradients(model, reference, 0)
        versions = [p._version for p in model.parameters()]
        with torch.no_grad():
            for m in (model, reference):
                for p in m.parameters():
                    change(p, p.grad)
        same_models(model, reference)
        compare_gradients(model, reference, 64 * torch.finfo(torch.float32).eps)
        if "data" not in name:
            assert all(p._version > v for p, v in zip(model.parameters(), versions)), name


@distributed("data=2,model=2")
def test_in_place_with_gradients(mesh):
    """What autograd records stays recorded: an in-place change of a value in a loss."""
    found = []
    for m in models(mesh):
        y = m[0].rows * 2
        y.mul_(m[0].rows).add_(1.0)
        y.square().sum().backward()
        z = m[0].columns.exp()
        z.mul_(2)
        error = ""
        try:
            z.sum().backward()
        except RuntimeError as raised:
            error = str(raised)
        assert "modified by an inplace operation" in error
        found.append(whole(m[0].rows.grad))
    same(*found)


class Lamb(torch.optim.Optimizer):
    """Norms of whole tensors: no element is updated alone."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("m", torch.zeros_like(p))
                m.lerp_(p.grad, 0.1)
                update = m / (m.square().mean().sqrt() + 1e-6)
                trust = p.norm() / (update.norm() + 1e-6)
                p.add_(update * trust, alpha=-group["lr"])


@distributed(*MESHES)
def test_optimizers_of_whole_tensors(mesh):
    kinds = [(Lamb, {}), (torch.optim.Adafactor, {"foreach": False})]
    if hasattr(torch.optim, "Muon"):
        kinds.append((torch.optim.Muon, {"lr": 0.1}))
    for kind, options in kinds:
        model, reference = models(mesh, torch.float64)
        chosen = [
            [
                p
                for p in m.parameters()
                if p.dim() == 2 or kind is not getattr(torch.optim, "Muon", 0)
            ]
            for m in (model, reference)
        ]
        optimizers = [kind(c, **options) for c in chosen]
        for step in range(3):
            step_on(optimizers, model, reference, step)
        tolerance = 1e-2 if options.get("lr") else 1e-9  # Muon iterates in bfloat16
        for mine, theirs in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(
                whole(mine).detach(), theirs.detach(), rtol=tolerance, atol=tolerance
            )


@distributed("data=2")
@pytest.mark.parametrize(
    "options",
    [{"param_dtype": torch.bfloat16}, {"microbatches": 2}, {"communication": ["* data"]}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_the_model_are_not_those_of_muon_s_step(mesh, options):
    """Its update has no batch, and computes in the parameters' own dtype."""
    if not hasattr(torch.optim, "Muon"):
        return  # came with torch 2.9
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)), Mean())
    reference = copy.deepcopy(model)
    gspmd.annotate(model, mesh, {"*.weight": "data _"})
    module = gspmd.parallelize(model, mesh, in_specs="data _", **options)
    rate, x = 0.5, torch.randn(16, 16)
    cubic = {"lr": rate, "ns_coefficients": (1.5, -0.5, 0.0), "weight_decay": 0.0}
    mine, other = (torch.optim.Muon(m.parameters(), **cubic) for m in (module, reference))
    module(x).backward()
    for got, want in zip(module.parameters(), reference.parameters()):
        want.grad = got.grad.full_tensor().clone()
    mine.step()
    other.step()
    for got, want in zip(module.parameters(), reference.parameters()):
        # A step of matrices with entries of at most 1, each rounded 15 times to 8 bits.
        atol = rate * 15 * 2**-9
        torch.testing.assert_close(whole(got).detach(), want.detach(), rtol=0, atol=atol)


class Mean(nn.Module):
    def forward(self, x):
        return x.square().mean()


@distributed("data=2", "data=2,model=2")
def test_muon_s_step_sends_what_owners_of_matrices_would(mesh):
    if not hasattr(torch.optim, "Muon"):
        return  # came with torch 2.9
    torch.manual_seed(0)
    count, width, rate = 4, 32, 0.5
    reference = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    model = copy.deepcopy(reference)
    gspmd.annotate(model, mesh, {"*.weight": " ".join([*mesh.names, "_"][:2])})
    module = gspmd.parallelize(model, mesh, in_specs="data _")
    # Cubic steps amplify the rounding of bfloat16 less than Muon's own.
    options = {"lr": rate, "ns_coefficients": (1.5, -0.5, 0.0), "weight_decay": 0.1}
    mine, other = (torch.optim.Muon(m.parameters(), **options) for m in (module, reference))
    x = torch.randn(16, width)
    for _ in range(3):
        for m, optimizer in ((module, mine), (reference, other)):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] /= 2  # a schedule
        for got, want in zip(module.parameters(), reference.parameters()):
            # Three steps of matrices with entries of at most 1, each rounded 15 times to 8 bits.
            atol = 3 * rate * 15 * 2**-9
            torch.testing.assert_close(whole(got).detach(), want.detach(), rtol=0, atol=atol)
    assert type(mine.state[next(module.parameters())]["momentum_buffer"]) is DTensor
    *_, update = groups_of_ours(next(module.parameters())).updates.values()  # the latest
    (plan, *_) = (p.plan for programs in update._programs.values() for p in programs)
    n = mesh.size
    owners = 2 * (n - 1) / n * count / n * width * width * 2
    assert plan.sent_bytes <= 1.1 * owners
