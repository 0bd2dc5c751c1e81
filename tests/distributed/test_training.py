"""Training on processes, against one process on every rank."""

import copy

import torch
import torch.distributed as dist
from language_model import whole
from ranks import distributed
from tied_model import Model, batch, close, marked, pair, specs
from torch import nn

import torchgspmd as gspmd
from torchgspmd.comm.process_groups import assumes_cuda
from torchgspmd.dtensor.storage import spec_of
from torchgspmd.fx_passes.lower.verify_in_flight import STARTS

MESHES = ("data=2", "model=3", "data=2,model=2")


@distributed(*MESHES)
def test_training(mesh):
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


@distributed(*MESHES)
def test_sharded_updates(mesh):
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
        advanced={"regather": "always"},
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
        for graph in (p.forward.__self__.graph, p.backward_graph)
        for n in graph.nodes
    }
    unsafe = {
        torch.ops._c10d_functional.all_gather_into_tensor.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
    assert called & STARTS
    assert bool(called & unsafe) == assumes_cuda()  # over gloo: see lower/lower_collectives.py


@distributed(*MESHES)
def test_modes(mesh):
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


@distributed(*MESHES)
def test_ways_to_a_gradient(mesh):
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


@distributed(*MESHES)
def test_scaler(mesh):
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


@distributed(*MESHES)
def test_passes(mesh):
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


@distributed(*MESHES)
def test_same_text(mesh):
    """The program's text is the same on all ranks."""
    model, _ = pair(mesh)
    model(*batch(0))
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, model.plan.program.code)
    assert len(set(texts)) == 1


@distributed("data=2,model=2")
def test_a_weight_that_is_changed_before_the_backward_is_an_error(mesh):
    """As in eager PyTorch, such as a discriminator that steps before the generator's backward."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    gspmd.annotate(model, mesh, {"0.weight": "model _", "2.weight": "_ model"})
    model = gspmd.parallelize(model, mesh, in_specs="auto")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 4)).sum().backward()
    early = model(torch.ones(4, 4)).sum()
    optimizer.step()
    for _ in range(2):
        try:
            early.backward(retain_graph=True)
        except gspmd.ShardingError as error:
            text = "'2.weight' was changed between a forward and its backward"
            assert str(error).startswith(text), error
        else:
            raise AssertionError("no error")
    model(torch.ones(4, 4)).sum().backward()
