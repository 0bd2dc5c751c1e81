"""Run under torchrun by test_parallelize.py: every check compares real processes with one process,
on every rank.
"""

import copy
import os
import sys
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Replicate

import torchgspmd as gspmd
from torchgspmd.comm import ring_einsum
from torchgspmd.comm.rank_check import RankCheck
from torchgspmd.custom_ops.random import draw_seed, uniform
from torchgspmd.dtensor import fused_optimizers
from torchgspmd.dtensor.storage import spec_of
from torchgspmd.fx_passes.lower.verify_in_flight import STARTS
from torchgspmd.fx_passes.partition import machine
from torchgspmd.fx_passes.schedule import collective_matmul

WORDS, WIDTH, HIDDEN = 51, 16, 65  # sizes that 2, 3 and 4 do not divide


class Model(nn.Module):
    """Tied embedding, dropout, a buffer that changes, uneven sizes."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.batch_norm = nn.BatchNorm1d(6)
        self.dropout = dropout

    drop = staticmethod(F.dropout)

    def forward(self, tokens, targets):  # [b, 6]
        x = self.embedding(tokens)  # [b, 6, m]
        x = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))), self.dropout, self.training)
        logits = self.batch_norm(x) @ self.embedding.weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def dropout_of_one_device(x, p, training):
    """F.dropout with the numbers that a mesh of one device draws."""
    shape = list(x.shape)
    drawn = (
        uniform(draw_seed(), 0, shape, [0] * x.dim(), shape, torch.float32, x.device, False)
        if training
        else torch.zeros(shape)
    )
    return x * ((drawn < 1 - p) / (1 - p)) if training else x


def marked(model, mesh):
    if "model" not in mesh.names:
        return model
    for tensor, spec in (
        (model.embedding.weight, "model _"),
        (model.up.weight, "model _"),
        (model.up.bias, "model"),
        (model.down.weight, "_ model"),
    ):
        gspmd.mark_sharding(tensor, mesh, spec)
    return model


def batch(step, rows=7):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(WORDS, (2, rows, 6), generator=generator)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(a, b, tolerance=1e-5):
    a, b = whole(a).detach(), whole(b).detach()
    assert a.shape == b.shape and torch.isfinite(a).all(), (a.shape, b.shape)
    scale = max(b.abs().max().item(), 1e-6)
    assert (a - b).abs().max().item() <= tolerance * scale, (
        f"off by {(a - b).abs().max().item() / scale:.1e}"
    )


def pair(mesh, **options):
    torch.manual_seed(0)
    reference = Model(**options)
    model = gspmd.parallelize(marked(copy.deepcopy(reference), mesh), mesh, in_specs=specs(mesh))
    reference.drop = dropout_of_one_device
    return model, reference


def specs(mesh):
    return ("data _", "data _") if "data" in mesh.names else None


def check_training(mesh):
    """AdamW, clipped gradients, dropout, running statistics; a last batch of another size."""
    model, reference = pair(mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, foreach=True) for m in (model, reference)]
    for step in range(4):
        losses, norms = [], []
        for m, optimizer in zip((model, reference), optimizers):
            torch.manual_seed(step)
            loss = m(*batch(step, 7 if step < 3 else 5))
            optimizer.zero_grad()
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5))
            optimizer.step()
            losses.append(loss)
        close(*losses)
        close(*norms)
    close(model.batch_norm.running_mean, reference.batch_norm.running_mean)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
    for name, parameter in reference.named_parameters():
        close(model.get_parameter(name), parameter, 1e-3)  # AdamW divides by small second moments


def check_sharded_updates(mesh):
    """Parameters, gradients and optimizer states in parts over an axis, weights gathered twice: the
    same training.
    """
    axis = mesh.names[0]
    torch.manual_seed(0)
    reference = Model(dropout=0.0)
    model = gspmd.parallelize(
        marked(copy.deepcopy(reference), mesh),
        mesh,
        in_specs=specs(mesh),
        shard_updates=axis,
        regather="always",
    )
    assert all(axis in spec_of(p, mesh).sharding_axes for p in model.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, fused=True) for m in (model, reference)]
    for step in range(4):
        losses = [m(*batch(step)) for m in (model, reference)]
        for loss in losses:
            loss.backward()
        close(
            *[
                torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5, foreach=True)
                for m in (model, reference)
            ]
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        close(*losses)
    assert any(
        "step" in n.meta and n.meta["step"].kind == "all_gather" and n.meta["backward"]
        for n in model.plan.sharded.nodes
    )
    called = {
        n.target
        for p in model._all_programs()
        for f in (p.forward, p.backward)
        for n in f.__self__.graph.nodes
    }
    unsafe = {
        torch.ops._c10d_functional.all_gather_into_tensor.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
    assert (
        called & STARTS and not called & unsafe
    )  # over gloo: see fx_passes/lower/gloo_all_to_all.py


def check_fused_steps(mesh):
    """Lists of DTensors are stepped on as lists of their parts, where all that meet are laid out
    alike; else as DTensor does it.
    """
    model, reference = pair(mesh, dropout=0.0)
    seen = []
    with patch.object(fused_optimizers, "as_before", lambda *call: seen.append(call)):
        for m in (model, reference):
            m(*batch(0)).backward()
            torch.optim.SGD(m.parameters(), 1e-2, fused=True).step()
        assert not seen
        for name, parameter in reference.named_parameters():
            close(model.get_parameter(name), parameter)
        for parameter in (p for p in model.parameters() if spec_of(p, mesh).sharding_axes):
            whole = [Replicate()] * len(mesh.axes)
            parameter.grad = DTensor.from_local(
                parameter.grad.full_tensor(), parameter.device_mesh, whole, run_check=False
            )
            torch.optim.SGD([parameter], 1e-2, fused=True).step()
            assert seen.pop()


def check_modes(mesh):
    """eval, no_grad, and gradients accumulated over two calls."""
    model, reference = pair(mesh, dropout=0.0)
    for m in (model, reference):
        m.eval()
        with torch.no_grad():
            m.out = m(*batch(0))
        m.train()
        (m(*batch(1)) + 2 * m(*batch(2))).backward()
    close(model.out, reference.out)
    for name, parameter in reference.named_parameters():
        close(model.get_parameter(name).grad, parameter.grad)


def check_ways_to_a_gradient(mesh):
    """Accumulation, hooks, torch.autograd.grad, backward(inputs=...): the same gradients and calls
    as on one process.
    """
    seen = []
    for model in pair(mesh, dropout=0.0):
        calls, params = [], list(model.parameters())
        model(*batch(0)).backward()
        first = [whole(p.grad).clone() for p in params]
        handles = [
            params[0].register_hook(lambda g: 2 * g),
            params[1].register_post_accumulate_grad_hook(lambda p, calls=calls: calls.append(1)),
        ]
        model(*batch(1)).backward()
        grads = torch.autograd.grad(model(*batch(2)), params[1:3])
        for handle in handles:
            handle.remove()
        model.zero_grad()
        model(*batch(3)).backward(inputs=params[2:4])
        seen.append(
            (
                len(calls),
                *first,
                *[whole(g) for g in grads],
                *[whole(p.grad) for p in params[2:4]],
                [p.grad is None for p in params],
            )
        )
    assert seen[0][0] == seen[1][0] == 1 and seen[0][-1] == seen[1][-1]
    for mine, theirs in zip(seen[0][1:-1], seen[1][1:-1]):
        close(mine, theirs)


def check_scaler(mesh):
    model, reference = pair(mesh, dropout=0.0)
    for m in (model, reference):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(m.parameters(), 0.1)
        scaler.scale(m(*batch(0))).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    for name, parameter in reference.named_parameters():
        close(model.get_parameter(name), parameter)


def check_layouts_of_results(mesh):
    """out_specs, DTensor arguments, gradients of arguments, shard_batch."""
    torch.manual_seed(0)
    reference = nn.Linear(WIDTH, 12)
    axis = mesh.names[0]
    count = mesh.count((axis,))
    model = gspmd.parallelize(copy.deepcopy(reference), mesh, out_specs=f"{axis} _")
    x = torch.randn(4 * count, WIDTH, requires_grad=True)
    y = model(x)
    assert isinstance(y, DTensor) and y.to_local().shape == (4, 12)
    close(y, reference(x))
    (grad,) = torch.autograd.grad(whole(y).square().sum(), x)
    close(grad, torch.autograd.grad(reference(x).square().sum(), x)[0])
    index = mesh.coordinates(dist.get_rank())[axis]
    part, again = (
        gspmd.shard_batch(x.detach()[4 * index : 4 * index + 4], mesh, f"{axis} _")
        for _ in range(2)
    )
    assert part.device_mesh is again.device_mesh  # no process groups a step
    close(part, x)
    close(model(part), reference(x))


def check_errors(mesh):
    """Other shapes on one rank: an error on every rank, no hang."""
    model, _ = pair(mesh, dropout=0.0)
    model(*batch(0))
    for compiled in (False, True):  # each rank has a program for what it is given
        for rows in (6, 7) if compiled else ():
            model(*batch(0, rows))
        try:
            model(*batch(0, 7 if dist.get_rank() else 6))
        except gspmd.ShardingError as error:
            assert str(error).startswith("the arguments differ between ranks"), error
            assert "worker_parallelize.py" in str(error), error
        else:
            raise AssertionError("no error")
        model(*batch(0)).backward()
    for program in model._all_programs():
        compared = program.carry if program.carries else program.settle
        sent = [
            n.target
            for n in program.forward.__self__.graph.nodes
            if n.target in STARTS or n.target == compared
        ]
        assert sent[0] == compared and sent.count(compared) == 1, sent
    model, _ = pair(mesh, dropout=0.5)
    for _ in range(2):  # when it is compiled, and later
        torch.manual_seed(dist.get_rank())
        try:
            model(*batch(0))
        except gspmd.ShardingError as error:
            assert str(error).startswith("the ranks would draw different random numbers"), error
        else:
            raise AssertionError("no error")
        torch.manual_seed(1)
        model(*batch(0))
    model, _ = pair(mesh, dropout=0.0)
    for _ in range(2):
        try:
            model(
                *batch(int(dist.get_rank() == mesh.size - 1))
            )  # each rank its own, as with DistributedDataParallel
        except gspmd.ShardingError as error:
            assert str(error).startswith(
                f"argument 'tokens' has other values on rank {mesh.size - 1} than on rank 0"
            ), error
            assert "made by shard_batch" in str(error), error
        else:
            raise AssertionError("no error")
    model(*batch(0))
    model = gspmd.parallelize(Distance(), mesh)
    model(torch.arange(6.0).view(2, 3) / (3 + 1e-6 * dist.get_rank()))  # rounding is no difference
    try:
        gspmd.parallelize(Model(), gspmd.Mesh(data=mesh.size + 1))
    except gspmd.ShardingError as error:
        assert f"there are {mesh.size} processes" in str(error), error
    else:
        raise AssertionError("no error")


class Distance(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 5)

    def forward(self, x):
        return self.inner(x).square().mean()


def check_a_sum_that_travels_with_the_comparison(mesh):
    torch.manual_seed(0)
    reference = Distance()
    everywhere = "+".join(mesh.names)
    model = gspmd.parallelize(copy.deepcopy(reference), mesh, in_specs=(f"{everywhere} _",))
    for rows in (12, 7, 12):
        x = torch.randn(rows, 3)
        losses = model(x), reference(x)
        close(*losses)
        for m, loss in zip((model, reference), losses):
            m.zero_grad()
            loss.backward()
        close(model.inner.weight.grad, reference.inner.weight.grad)
    try:
        model(torch.randn(12 if dist.get_rank() else 7, 3))
    except gspmd.ShardingError as error:
        assert str(error).startswith("the arguments differ between ranks"), error
    else:
        raise AssertionError("no error")
    close(model(x), reference(x))
    assert all(program.carries for program in model._all_programs())
    half = model.to(torch.bfloat16)
    close(half(x.bfloat16()), reference.to(torch.bfloat16)(x.bfloat16()), 2**-7)  # two roundings
    for forward in (p.forward.__self__.graph for p in model._all_programs()):
        assert not [n for n in forward.nodes if n.target in STARTS]


class TwoDistances(nn.Module):
    """Two sums of different types, the second of which begins before the first has ended."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (x * self.weight).square().mean(), x.double().sin().mean()


def check_nothing_is_sent_before_the_comparison_ends(mesh):
    reference = TwoDistances()
    model = gspmd.parallelize(
        copy.deepcopy(reference), mesh, in_specs=("+".join(mesh.names) + " _",)
    )
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        for got, want in zip(model(x), reference(x), strict=True):
            close(got, want)
    (program,) = model._all_programs()
    ends = {program.settle, RankCheck.total}
    order = [n.target for n in program.forward.__self__.graph.nodes if n.target in STARTS | ends]
    assert order[0] in ends and len(order) > 1, order


class ByValues(nn.Module):
    """Sizes and numbers that depend on values, in the forward and in the backward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 6)

    def forward(self, x):
        y = self.inner(x).sin()
        positive = y[y > 0]
        return (positive * 2).mean() + (y * y.detach().abs().max().item()).sum(), positive * 3


def check_sizes_that_depend_on_values(mesh):
    torch.manual_seed(0)
    reference = ByValues()
    axis = mesh.names[0]
    model = gspmd.parallelize(copy.deepcopy(reference), mesh, in_specs=f"{axis} _")
    for step in range(2):
        x = torch.randn(7, 4, generator=torch.Generator().manual_seed(step))
        (loss, rows), (expected, wanted) = model(x), reference(x)
        close(loss, expected)
        close(rows, wanted)
        loss.backward()
        expected.backward()
    close(model.inner.weight.grad, reference.inner.weight.grad)


def check_native_random_numbers(mesh):
    axis = mesh.names[0]
    torch.manual_seed(0)
    model = gspmd.parallelize(
        nn.Dropout(0.5), mesh, in_specs=f"{axis} _", out_specs=f"{axis} _", rng="native"
    )
    x = torch.ones(8 * mesh.size, 8)
    whole_result = whole(model(x))
    rows = len(x) // dict(mesh.axes)[axis]
    parts = [part == 0 for part in whole_result.split(rows)]
    assert not any(torch.equal(p, q) for i, p in enumerate(parts) for q in parts[:i])
    assert abs(torch.stack(parts).float().mean().item() - 0.5) < 0.15


def check_uneven_weights(mesh):
    """Weights stored along dimensions that the axis does not divide: gathered together, their
    gradients scattered.
    """
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 17))
    model, axis = copy.deepcopy(reference), mesh.names[0]
    for parameter in model.parameters():
        gspmd.mark_sharding(parameter, mesh, " ".join([axis] + ["_"] * (parameter.dim() - 1)))
    model = gspmd.parallelize(model, mesh, in_specs=f"{axis} _")
    x = torch.randn(301, 16)
    for m in (model, reference):
        m(x).square().mean().backward()
    for name, parameter in reference.named_parameters():
        close(model.get_parameter(name).grad, parameter.grad)


class Moves(nn.Module):
    """Every value in another layout than the one before it."""

    def __init__(self, mesh, layouts):
        super().__init__()
        self.mesh, self.layouts = mesh, layouts

    def forward(self, x):
        for layout in self.layouts:
            x = gspmd.mark_sharding(torch.sin(x), self.mesh, layout)
        return x


def check_exchanges(mesh):
    """From layouts to others whose blocks do not nest, forward and backward, sizes that do not
    divide; one device may have nothing.
    """
    if len(mesh.names) < 2:
        return
    torch.manual_seed(0)
    a, b = mesh.names[:2]
    model = gspmd.parallelize(
        Moves(mesh, (f"{a} {b}", f"{b} {a}", f"{a}+{b} _", f"_ {b}+{a}", f"{b} _", f"{a} _")), mesh
    )
    for shape in ((8, 8), (5, 7), (9, 16), (13, 3)):
        x = torch.randn(shape, requires_grad=True)
        want = x
        for _ in range(6):
            want = torch.sin(want)
        y = model(x)
        close(y, want)
        close(
            torch.autograd.grad(whole(y).square().sum(), x)[0],
            torch.autograd.grad(want.square().sum(), x)[0],
        )
        assert [c.kind for c in model.plan.collectives].count("permute") >= 2, (
            model.plan.collectives
        )


class Grouped(nn.Module):
    """Two key heads for four query heads: on an axis of four, each is held by two devices."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.o = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 16)

    def forward(self, x):  # [b, s, 16]
        q, k = self.q(x).unflatten(-1, (2, 2, 4)), self.k(x).unflatten(-1, (2, 4))
        p = torch.einsum("bskgd,btkd->bkgst", q, k).softmax(-1)
        return self.o(torch.einsum("bkgst,btkd->bskgd", p, k).flatten(2))


def check_parts_of_axes(mesh):
    """On all processes as one axis: groups over a part of it."""
    whole_mesh = gspmd.Mesh(model=mesh.size)
    torch.manual_seed(0)
    reference, x = Grouped(), torch.randn(2, 5, 16)
    model = copy.deepcopy(reference)
    for tensor, spec in (
        (model.q.weight, "model _"),
        (model.q.bias, "model"),
        (model.o.weight, "_ model"),
    ):
        gspmd.mark_sharding(tensor, whole_mesh, spec)
    model = gspmd.parallelize(model, whole_mesh)
    close(model(x), reference(x))
    for m in (model, reference):
        m(x).square().mean().backward()
    for name, parameter in reference.named_parameters():
        close(model.get_parameter(name).grad, parameter.grad, 1e-4)
    assert mesh.size != 4 or any(
        a.startswith("model:") for c in model.plan.collectives for a in c.axes
    ), model.plan.collectives


class Kinds(nn.Module):
    """Every way that values go: from part to part, from parts to the whole, sums and other
    reductions of parts to both.
    """

    def __init__(self, mesh, computes):
        super().__init__()
        self.mesh, self.computes = mesh, computes

    def forward(self, x):  # [6, 9]
        axis = self.mesh.names[-1]
        x = gspmd.mark_sharding(x.clone(), self.mesh, f"{axis} _")
        results = [
            gspmd.mark_sharding(x.clone(), self.mesh, f"_ {axis}").clone(),
            gspmd.mark_sharding(x.clone(), self.mesh, "_ _"),
        ]
        for reduced in (op(x) for op in self.computes):
            results += [
                gspmd.mark_sharding(reduced.clone(), self.mesh, spec) for spec in ("_", axis)
            ]
        return results


class Chain(nn.Module):
    """A conditional random field: pairs of tags read the table of transitions, whose rows are on
    several devices.
    """

    def __init__(self):
        super().__init__()
        self.emissions, self.transitions = nn.Linear(6, 4), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):  # [b, s, 6]
        emissions, (b, s) = self.emissions(x), x.shape[:2]
        scores = emissions[:, 0]
        for i in range(1, s):
            scores = torch.logsumexp(
                scores[:, :, None] + self.transitions + emissions[:, i, None], 1
            )
        tags = torch.arange(b * s).view(b, s) % 4
        path = (
            emissions.gather(2, tags[..., None]).sum()
            + self.transitions[tags[:, :-1], tags[:, 1:]].sum()
        )
        return scores.logsumexp(1).sum() - path


def check_a_coordinate_that_forward_and_backward_compare(mesh):
    torch.manual_seed(0)
    axis, reference, x = mesh.names[0], Chain(), torch.randn(2, 5, 6)
    model = gspmd.parallelize(
        gspmd.annotate(copy.deepcopy(reference), mesh, {"transitions": f"{axis} _"}),
        mesh,
        in_specs=f"{axis} _ _",
    )
    for m in (model, reference):
        m(x).backward()
    close(model(x), reference(x))
    for name, parameter in reference.named_parameters():
        close(model.get_parameter(name).grad, parameter.grad)


def check_recurrent_layers(mesh):
    """Their lists of weights hold what is stored, not the whole, and no call makes another program
    of it.
    """
    torch.manual_seed(0)
    axis, reference = mesh.names[0], nn.GRU(6, 5, batch_first=True)
    model = gspmd.parallelize(
        gspmd.annotate(copy.deepcopy(reference), mesh, {"weight_*": f"{axis} _"}),
        mesh,
        in_specs=f"{axis} _ _",
    )
    assert all(isinstance(weight, DTensor) for weight in model._flat_weights)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(3):
        x = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(step))
        losses = [m(x)[0].square().mean() for m in (model, reference)]
        close(*losses, 1e-5)
        for loss, optimizer in zip(losses, optimizers):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert len(model._all_programs()) == 1


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.near = nn.Linear(6, 5), nn.Linear(5, 3), torch.eye(7).to_sparse()

    def forward(self, x, near):
        return (self.near + near) @ self.down((near @ self.up(x)).relu())


def check_sparse_matrices(mesh):
    torch.manual_seed(0)
    axis, reference = mesh.names[0], Graph()
    model = gspmd.parallelize(
        gspmd.annotate(copy.deepcopy(reference), mesh, {"*.weight": f"{axis} _"}),
        mesh,
        in_specs=(f"{axis} _", None),
    )
    for seed in range(2):
        near = torch.sparse_coo_tensor(
            torch.randint(7, (2, 12), generator=torch.Generator().manual_seed(seed)),
            torch.ones(12),
            (7, 7),
        )
        x = torch.randn(7, 6, generator=torch.Generator().manual_seed(seed))
        for m in (model, reference):
            m.zero_grad()
            m(x, near).square().sum().backward()
        for name, parameter in reference.named_parameters():
            close(model.get_parameter(name).grad, parameter.grad)
        near.mul_(2)
        close(model(x, near), reference(x, near))
    assert len(model._all_programs()) == 1


def check_types(mesh):
    """Numbers of all types, gloo's and others."""
    reductions = [lambda x: x.sum(0, dtype=x.dtype), lambda x: x.prod(0, dtype=x.dtype)]
    ordered = [lambda x: x.amax(0), lambda x: x.amin(0)]
    for dtype in (
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.complex64,
        torch.complex128,
        torch.bool,
        torch.float8_e4m3fn,
    ):
        torch.manual_seed(0)
        x = torch.randint(-3, 4, (6, 9)).to(dtype)
        x = x * (1 + 1j) if dtype.is_complex else x
        computes = {torch.bool: ordered, torch.float8_e4m3fn: []}.get(
            dtype, reductions if dtype.is_complex else reductions + ordered
        )
        for many in (1, 60000):  # a small all_reduce takes another way than a large one
            given = x if many == 1 else x.repeat(1, many)
            want = Kinds(gspmd.Mesh(**dict.fromkeys(mesh.names, 1)), computes)(given)
            got = gspmd.parallelize(Kinds(mesh, computes), mesh, strict="warn")(given)
            for mine, theirs in zip(got, want):
                assert mine.dtype == dtype and torch.equal(
                    *(t.float() if dtype.itemsize == 1 else t for t in (whole(mine), theirs))
                ), many


def check_same_text(mesh):
    """The program's text is the same on all ranks."""
    model, _ = pair(mesh)
    model(*batch(0))
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, model.plan.program.code)
    assert len(set(texts)) == 1


def check_passes(mesh):
    """Without the passes that decide when to communicate: the same gradients."""
    for skip in (("bucket",), ("overlap",), ("bucket", "overlap", "prefetch")):
        torch.manual_seed(0)
        reference = Model(dropout=0.0)
        model = gspmd.parallelize(
            marked(copy.deepcopy(reference), mesh), mesh, in_specs=specs(mesh), skip_passes=skip
        )
        for m in (model, reference):
            m(*batch(0)).backward()
        for name, parameter in reference.named_parameters():
            close(model.get_parameter(name).grad, parameter.grad)


class Sequence(nn.Module):
    """Its stream is laid out along the sequence: gathered before `up` and `gate`, scattered behind
    `down`.
    """

    def __init__(self, mesh):
        super().__init__()
        self.up, self.gate, self.down = (
            nn.Linear(48, 96),
            nn.Linear(48, 96, bias=False),
            nn.Linear(96, 48),
        )
        self.mesh = mesh

    def forward(self, x):  # [b, s, m]
        h = gspmd.mark_sharding(x.sin(), self.mesh, "_ model _")
        return gspmd.mark_sharding(
            self.down(F.gelu(self.up(h)) * self.gate(h)), self.mesh, "_ model _"
        )


def rings(mesh):
    """Products in parts that travel round, made to pay here."""
    machine.CPU, collective_matmul.GAIN = machine.GPU, float("inf")
    for backend in ("torch", "inductor"):
        torch.manual_seed(0)
        reference, x = Sequence(mesh), torch.randn(2, 12, 48)
        marks = {
            "up.weight": "model _",
            "up.bias": "model",
            "gate.weight": "model _",
            "down.weight": "_ model",
        }
        model = gspmd.parallelize(
            gspmd.annotate(copy.deepcopy(reference), mesh, marks), mesh, backend=backend
        )
        close(model(x), reference(x))
        for m in (model, reference):
            m(x).square().sum().backward()
        for name, parameter in reference.named_parameters():
            close(model.get_parameter(name).grad, parameter.grad)
        targets = [n.target for n in model.plan.program.graph.nodes]
        assert ring_einsum.gather_einsum in targets and ring_einsum.einsum_scatter in targets, (
            model.plan
        )
    if dist.get_rank() == 0:
        print("rings hold")


def save(mesh, path):
    model, _ = pair(mesh, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(2):
        optimizer.zero_grad()
        model(*batch(step)).backward()
        optimizer.step()
    parameters, state = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": state}, checkpoint_id=path)


def load(mesh, path):
    """Resumes what `save` saved on another mesh; two more steps equal those of one process."""
    model, reference = pair(mesh, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    parameters, state = get_state_dict(model, optimizer)
    content = {"model": parameters, "optimizer": state}
    dcp.load(content, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"]
    )
    other = torch.optim.AdamW(reference.parameters(), 1e-2)
    for step in range(4):
        other.zero_grad()
        expected = reference(*batch(step))
        expected.backward()
        other.step()
        if step >= 2:
            optimizer.zero_grad()
            loss = model(*batch(step))
            loss.backward()
            optimizer.step()
            close(loss, expected, 1e-4)


CHECKS = (
    check_training,
    check_sharded_updates,
    check_fused_steps,
    check_modes,
    check_ways_to_a_gradient,
    check_scaler,
    check_a_coordinate_that_forward_and_backward_compare,
    check_recurrent_layers,
    check_sparse_matrices,
    check_layouts_of_results,
    check_errors,
    check_a_sum_that_travels_with_the_comparison,
    check_nothing_is_sent_before_the_comparison_ends,
    check_uneven_weights,
    check_sizes_that_depend_on_values,
    check_native_random_numbers,
    check_exchanges,
    check_parts_of_axes,
    check_passes,
    check_types,
    check_same_text,
)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = gspmd.Mesh.parse(sys.argv[1])
    command = sys.argv[2]
    if command == "checks":
        for check in CHECKS:
            check(mesh)
            dist.barrier()
            if dist.get_rank() == 0:
                print(f"{check.__name__} holds on {mesh}", flush=True)
    elif command == "rings":
        rings(mesh)
    else:
        {"save": save, "load": load}[command](mesh, sys.argv[3])
        if dist.get_rank() == 0:
            print(f"{command} done on {mesh}", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo may abort at exit


if __name__ == "__main__":
    main()
