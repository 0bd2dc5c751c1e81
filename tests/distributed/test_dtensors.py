"""What training loops for one device do with parameters and gradients, against one process, on
every rank.
"""

import copy
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from language_model import (
    WORDS,
    close,
    error_of,
    loss_of,
    pair,
    same_gradients,
    same_parameters,
    tokens,
    whole,
)
from ranks import distributed, on_cpu
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import torchgspmd as gspmd
from torchgspmd.comm.rank_failure import listed

MESHES = ("model=3", "data=2,model=2")


@distributed(*MESHES)
def test_penalties_beside_the_model(mesh):
    """Plain tensors meet DTensors, in the loss and, where torch has layouts for what they pass, in
    gradients.
    """
    penalties = {
        "squares": lambda m, loss: loss + 0.01 * sum(p.pow(2).sum() for p in m.parameters()),
        "in place": lambda m, loss: loss.add_(m.up.weight.abs().sum(), alpha=0.01),
        "norm": lambda m, loss: loss + 0.01 * m.down.weight.square().sum().sqrt(),
        "orthogonal": lambda m, loss: (
            0.01 * (m.up.weight.T @ m.up.weight - torch.eye(16)).square().sum() + loss
        ),
    }
    for penalty in penalties.values():
        model, reference = pair(mesh)
        losses = [penalty(m, loss_of(m)) for m in (model, reference)]
        assert abs(losses[0].item() - losses[1].item()) < 1e-5 * losses[1].item()
        for loss in losses:
            loss.backward()
        same_gradients(model, reference)


@distributed(*MESHES)
def test_numbers_and_text(mesh):
    model, reference = pair(mesh)
    for m in (model, reference):
        loss_of(m).backward()
    for mine, theirs in zip(model.parameters(), reference.parameters()):
        for statistic in (
            torch.norm,
            torch.sum,
            torch.amax,
            lambda x: x.abs().max(),
            lambda x: (x > 0).sum(),
        ):
            for a, b in ((mine, theirs), (mine.grad, theirs.grad)):
                a, b = statistic(a.detach()).item(), statistic(b.detach()).item()
                assert abs(a - b) <= 1e-5 * max(1.0, abs(b)), (statistic, a, b)
        assert (
            mine.tolist() == theirs.tolist()
            and (mine.detach().cpu().numpy() == theirs.detach().numpy()).all()
        )
    assert (
        abs(copy.deepcopy(model).up.weight.norm().item() - reference.up.weight.norm().item()) < 1e-5
    )
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (model, reference)]
    assert f"{norms[0]:.3f}" == f"{norms[1]:.3f}" and norms[0] < 100


def _added(tensors):
    torch._foreach_add_(tensors, 0.5)
    torch._foreach_addcmul_(tensors, tensors, tensors)
    return tensors


WITHOUT_A_LAYOUT = {  # of a matrix w and its gradient g
    "foreach copy": lambda w, g: torch._foreach_copy_([torch.zeros_like(w)], [g])[0],
    "foreach maximum": lambda w, g: torch._foreach_maximum([w, g], 0.01)[1],
    "in place of what is pending": lambda w, g: g.norm().add_(1.0).sqrt_(),
    "lists in place": lambda w, g: torch.stack(
        _added([w.norm(dim=0), w.norm(dim=1)[:1].repeat(16), g.norm(dim=0)])
    ),
    "in place of a largest one": lambda w, g: g.abs().max().add_(1.0),
    "average in place": lambda w, g: g.mean().lerp_(g.sum(), 0.3),
    "into a plain state": lambda w, g: (
        torch.zeros(16, 16).lerp_(g.T @ g, 0.1).addcmul_(g.T @ g, w.T @ w)
    ),
    "into plain rows": lambda w, g: torch.zeros(len(g), 16).add_(g).copy_(w),
    "out": lambda w, g: (
        torch.mul(torch.ones(len(g), 16), 2.0, out=torch.zeros_like(w))
        + torch.mul(w, g, out=torch.zeros_like(w))
    ),
    "transposed in place": lambda w, g: g.clone().transpose_(0, 1),
    "by a mask": lambda w, g: w[g > 0].sum() + w.masked_select(g > 0).sum(),
    "triangle": lambda w, g: torch.linalg.qr(g)[1].abs(),
    "inverse": lambda w, g: torch.linalg.inv(w.T @ w + torch.eye(16)),
    "sorted": lambda w, g: w.flatten().sort().values + g.flatten().topk(w.numel()).values,
    "middle": lambda w, g: torch.stack(
        [w.median(), w.quantile(0.3), g.flatten().kthvalue(5).values]
    ),
    "different ones": lambda w, g: (w > 0).float().unique(),
    "largest": lambda w, g: w.max(0).indices + g.min(0).indices,
    "close": lambda w, g: torch.tensor(torch.allclose(w, w + 1e-9) and torch.equal(g, g + 0)),
    "rows in turn": lambda w, g: w.roll(1, 0) + w.flip(0) + g.diff(dim=0, prepend=g[:1]),
    "convolution": lambda w, g: F.conv1d(torch.ones(1, 16, 9), w[:, :, None].repeat(1, 1, 3)),
    "convolution of rows": lambda w, g: F.conv1d(w.T[:, None], torch.ones(2, 1, 3)),
    "scattered": lambda w, g: g.scatter_add(0, torch.zeros(1, 16, dtype=torch.int64), w[:1]),
}


@distributed(*MESHES)
def test_operations_without_a_layout(mesh):
    """Are computed of whole tensors, by all ranks; what they change in place is stored in parts."""
    model, reference = pair(mesh)
    torch.set_default_dtype(torch.float64)  # an inverse amplifies rounding
    for m in (model, reference):
        loss_of(m.double()).backward()
    for name, operation in WITHOUT_A_LAYOUT.items():
        mine, theirs = (
            operation(m.up.weight.detach(), m.up.weight.grad.clone()) for m in (model, reference)
        )
        torch.testing.assert_close(
            whole(mine), theirs, msg=lambda text, name=name: f"{name}: {text}"
        )
    torch.set_default_dtype(torch.float32)
    for m in (model, reference):
        m.float()
    for m in (model, reference):
        with torch.no_grad():
            torch._foreach_copy_(
                [m.up.weight, m.down.weight], [m.up.weight.grad, m.down.weight.grad]
            )
    same_parameters(model, reference)
    assert model.up.weight.placements == model.up.weight.grad.placements
    for m in (model, reference):
        F.conv1d(m.up.weight.T[:, None], torch.ones(2, 1, 3)).square().sum().backward()
    same_gradients(model, reference)


@distributed(*MESHES)
@on_cpu
def test_reading_on_one_rank(mesh):
    """What a reduction is pending of is read by all ranks: a rank that does alone, and those that
    go on, are told.
    """
    model, _ = pair(mesh)
    loss_of(model).backward()
    total = model.up.weight.grad.norm()
    error = error_of(lambda: total.item() if dist.get_rank() == 0 else model(tokens()))
    call, others = "the read of a DTensor (full_tensor)", [*range(1, mesh.size)]
    assert f"not come to {call}, where rank 0 waits" in error.partition("\n")[0], error
    assert f"rank 0 is in {call} (step " in error, error
    assert "in a call of the module (step" in error, error
    assert listed(others) in error, error
    assert total.item() > 0


@distributed(*MESHES)
def test_data_and_entries(mesh):
    """Assignments to `.data`, whole ones and DTensors, and to entries of sharded dimensions."""

    def clip(m):
        for p in m.parameters():
            p.data = p.data.clamp(-0.05, 0.05)

    def swap(m):
        m.up.weight.data = torch.arange(512.0).view(32, 16) / 512

    def vector(m):
        nn.utils.vector_to_parameters(
            2 * torch.cat([whole(p).detach().flatten() for p in m.parameters()]), m.parameters()
        )
        if torch.__version__ >= "2.10":  # before, parts of different sizes cannot be flattened
            nn.utils.vector_to_parameters(
                2 * nn.utils.parameters_to_vector(m.parameters()).detach(), m.parameters()
            )

    @torch.no_grad()
    def entries(m):
        m.embedding.weight[3] = 0
        m.embedding.weight[4, 2:5] = torch.ones(3)
        m.up.weight.data[torch.arange(32) % 2 == 0] = 3.0
        m.down.weight[:, 5] = m.down.weight[:, 6]
        m.up.bias.data[:] = 0.5

    @torch.no_grad()
    def parts(m):
        m.embedding.weight[3].zero_()
        m.up.weight[2:5].fill_(0.5)
        m.up.weight.data[-1] += 1
        m.down.weight[..., 7].mul_(2)
        nn.init.constant_(m.up.bias[8:24], 0.25)
        m.down.weight[torch.tensor([1, 2])].zero_()  # a copy
        m.up.weight[4:10][:, 2:4][1].copy_(torch.ones(2))

    @torch.no_grad()
    def noise(m):
        generator = torch.Generator().manual_seed(0)
        for p in m.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
            p.mul_(torch.rand(p.shape, generator=generator))

    for change in (clip, swap, vector, entries, parts, noise):
        model, reference = pair(mesh)
        for m in (model, reference):
            m(tokens())
            change(m)
        same_parameters(model, reference)
        for m in (model, reference):
            loss_of(m).backward()
        same_gradients(model, reference)
    error = error_of(lambda: setattr(model.up.weight, "data", torch.ones(3)))
    assert error.startswith(
        "the data of a DTensor, torch.float32 of shape [32, 16], is set to torch.float32 of "
        "shape [3]"
    ), error
    before = model.up.weight.placements
    model.up.weight.data = DTensor.from_local(
        torch.ones(32, 16), model.up.weight.device_mesh, run_check=False
    )
    assert model.up.weight.placements == before and whole(model.up.weight).eq(1).all()
    other = DTensor.from_local(
        torch.ones(32, 16), init_device_mesh("cpu", (dist.get_world_size(),)), run_check=False
    )
    assert "the data of a DTensor on" in error_of(lambda: setattr(model.up.weight, "data", other))


@distributed(*MESHES)
def test_parts_in_place(mesh):
    """What is written into views of sharded dimensions, by methods and functions, into parts of
    parts and in loops over rows.
    """

    def scaled(rows):
        for i, row in enumerate(rows):
            row *= 1 + i

    changes = {
        "chunk": lambda w: [nn.init.constant_(part, i) for i, part in enumerate(w.chunk(3))],
        "torch.split": lambda w: torch.split(w, [1, 4, w.shape[0] - 5])[1].mul_(3),
        "the other dimension": lambda w: w.chunk(2, 1)[1].neg_(),
        "tensor_split": lambda w: w.tensor_split(3)[2].clamp_(min=0),
        "rows": scaled,
        "unbind": lambda w: torch.unbind(w, 1)[3].sqrt_().nan_to_num_(0.5),
        "select": lambda w: torch.select(w, 0, 2).masked_fill_(torch.arange(w.shape[1]) > 2, 0.25),
        "narrow": lambda w: w.narrow(0, 1, 3).t()[1].fill_(7),
        "diagonal": lambda w: w.diagonal().add_(1),
        "view": lambda w: w.view(-1)[3:20].zero_(),
        "reshape": lambda w: w.reshape(w.shape[0], 4, -1)[:, 1][2:7].flatten(1).fill_(2),
        "transposed": lambda w: w.chunk(2)[1].T[:2].mul_(w[0, 0]),
        "a copy of a part": lambda w: w.reshape(w.shape[0], 4, -1)[:, 1].flatten()[2:7].fill_(2),
        "a part of a part": lambda w: w[1:8].chunk(2)[1][0, 1:3].copy_(torch.tensor([5.0, 6.0])),
        "data": lambda w: w.data.chunk(2)[0].zero_(),
    }
    for name, change in changes.items():
        model, reference = pair(mesh)
        for m in (model, reference):
            with torch.no_grad():
                change(m.embedding.weight), change(m.up.weight), change(m.down.weight)
        for key, parameter in reference.named_parameters():
            assert torch.equal(whole(dict(model.named_parameters())[key]), parameter), (name, key)
    model = gspmd.parallelize(pair(mesh)[0]._model, mesh, out_specs=f"_ _ {mesh.names[-1]}")
    error = error_of(lambda: model(tokens())[..., 0].zero_())
    assert error.startswith(
        "a part of a sharded tensor is changed in place while gradients are recorded"
    ), error


@distributed(*MESHES)
@on_cpu
def test_random_numbers(mesh):
    """Initialization of what is wrapped already, on meta first too, and noise: the numbers of one
    device.
    """
    kinds = [
        nn.init.normal_,
        nn.init.uniform_,
        nn.init.trunc_normal_,
        nn.init.xavier_uniform_,
        nn.init.kaiming_normal_,
        nn.init.orthogonal_,
        lambda w: nn.init.sparse_(w, 0.5),
        nn.init.eye_,
        lambda w: nn.init.normal_(w, generator=torch.Generator().manual_seed(3)),
        lambda w: w.exponential_(),
        lambda w: w.random_(5),
        lambda w: w.bernoulli_(0.3),
        lambda w: w.bernoulli_(w.sigmoid()),
        lambda w: w.copy_(torch.bernoulli(w.sigmoid())),
        lambda w: w.add_(torch.randn_like(w), alpha=0.1),
        lambda w: w.mul_(torch.rand_like(w)),
        lambda w: w.copy_(torch.randint_like(w, 9)),
        lambda w: w.copy_(F.dropout(w, 0.4)),
        lambda w: w.copy_(torch.normal(w, 0.1)),
        lambda w: w.copy_(F.rrelu(w, training=True)),
    ]
    for kind in kinds:
        model, reference = pair(mesh)
        for m in (model, reference):
            torch.manual_seed(1)
            with torch.no_grad():
                (
                    kind(m.up.weight),
                    kind(m.embedding.weight),
                    kind(m.head.weight),
                    kind(m.down.weight),
                )
        same_parameters(model, reference)
    model, reference = pair(mesh)
    with torch.device("meta"):
        deferred = type(reference)()
    gspmd.annotate(
        deferred, mesh, {"up.weight": f"{mesh.names[-1]} _", "down.weight": f"_ {mesh.names[-1]}"}
    )
    deferred = gspmd.parallelize(deferred, mesh)
    error = error_of(lambda: deferred(tokens()))
    assert (
        error.startswith("'embedding.weight' is on meta: it has no values")
        and "model.to_empty(device='cpu')" in error
    ), error
    deferred.to_empty(device="cpu")
    for m in (deferred, reference):
        torch.manual_seed(2)
        for module in (m.embedding, m.up, m.down, m.head):
            module.reset_parameters()
        m.shift.zero_()
    same_parameters(deferred, reference)
    for m in (deferred, reference):
        loss_of(m).backward()
    same_gradients(deferred, reference)
    torch.manual_seed(dist.get_rank())
    error = error_of(model.up.reset_parameters)
    assert (
        error.startswith("the ranks would draw different random numbers")
        and "torch.manual_seed" in error
    ), error


@distributed(*MESHES)
def test_optimizers(mesh):
    """Those that need more than torch's DTensor: masks, norms that are changed in place, lists,
    products of flattened parameters.
    """
    kinds = [
        (kind, {"foreach": foreach})
        for kind in (torch.optim.Rprop, torch.optim.Adafactor)
        for foreach in (False, True)
    ]
    if torch.__version__ >= "2.10":  # before, parts of different sizes cannot be flattened
        kinds.append((torch.optim.LBFGS, {}))
    for kind, options in kinds:
        model, reference = pair(mesh)
        for m in (model, reference):
            m.double()  # some of these amplify rounding
            optimizer = kind(m.parameters(), 0.01, **options)
            for step in range(3):

                def loss(m=m, step=step, optimizer=optimizer):
                    optimizer.zero_grad()
                    found = loss_of(m, step)
                    found.backward()
                    return found

                optimizer.step(loss)
        same_parameters(model, reference)


@distributed(*MESHES)
def test_results_as_they_are_laid_out(mesh):
    """A loss of a DTensor and plain targets; entries that are assigned before."""

    def assigned(y, *entries):
        y = 1 * y
        for index, value in entries:
            y[index] = value(y) if callable(value) else value
        return y.square().sum()

    model, reference = pair(mesh)
    model = gspmd.parallelize(model._model, mesh, out_specs=f"_ _ {mesh.names[-1]}")
    targets, signs = torch.linspace(0, 1, WORDS).expand(6, 5, WORDS), torch.ones(6, 5, WORDS)
    losses = [
        lambda y: F.cross_entropy(y.flatten(0, 1), tokens().flatten()),
        lambda y: (y - targets).abs().sum(),
        lambda y: assigned(y, ((..., 0), 0.0), ((..., slice(2, 5)), -1.0)),
        lambda y: assigned(y, ((..., 1), lambda y: 2 * y[..., 2]), ((0,), 0.5)),
        lambda y: y.gather(-1, tokens()[..., None]).float().square().sum(),
    ]
    if torch.__version__ >= "2.10":  # before, DTensor does not have these
        losses += [
            lambda y: (y.cumsum(-1) * targets).sum(),
            lambda y: F.mse_loss(y, targets),
            lambda y: F.smooth_l1_loss(y, targets, reduction="sum"),
            lambda y: F.huber_loss(y, targets),
            lambda y: F.soft_margin_loss(y, signs),
            lambda y: F.binary_cross_entropy(y.sigmoid(), targets, weight=targets),
            lambda y: F.binary_cross_entropy_with_logits(y, targets),
        ]
    for loss in losses:
        found = [loss(m(tokens())) for m in (model, reference)]
        close(*found)
        for each in found:
            each.backward()
        same_gradients(model, reference)
        for m in (model, reference):
            m.zero_grad()


@distributed("data=2,model=2")
def test_norms(mesh):
    """Norms of all gradients, sharded or not; one rank has no rows of some."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 1)).double()
    x = torch.randn(6, 7).double()
    marks = {"0.weight": "model _", "1.weight": "_ data", "2.weight": "_ data+model"}
    model = gspmd.annotate(copy.deepcopy(plain), mesh, marks | {"1.bias": "data+model"})
    model = gspmd.parallelize(model, mesh)
    for each in (plain, model):
        each(x).square().sum().backward()
    ours, theirs = ([p.grad for p in m.parameters()] for m in (model, plain))
    for order in (2.0, 1.0, 0.5, 3, math.inf):
        norm = nn.utils.get_total_norm(ours, order)
        expected = nn.utils.get_total_norm(theirs, order)
        torch.testing.assert_close(norm.full_tensor(), expected, rtol=1e-12, atol=0)
    for each in (plain, model):
        nn.utils.clip_grad_norm_(each.parameters(), 0.1)
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine.full_tensor(), other, rtol=1e-12, atol=0)
