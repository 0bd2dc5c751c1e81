"""param_dtype and reduce_dtype on processes: as FSDP2 with its MixedPrecisionPolicy, and as the
same casts on one process.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from language_model import whole
from ranks import distributed
from tied_model import close
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call

import torchgspmd as gspmd

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
WORDS, WIDTH, HIDDEN = 24, 16, 48
EPS = torch.finfo(BF16).eps


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Two blocks between an embedding and a head; a buffer that is added in float32."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.Sequential(Block(), Block())
        self.register_buffer("shift", torch.linspace(0, 1, WORDS))

    def forward(self, tokens, weights):  # [b, s], [b]
        logits = self.head(self.blocks(self.words(tokens)))
        losses = F.cross_entropy(
            (logits + self.shift).transpose(1, 2), tokens, reduction="none"
        )  # [b, s]
        return (losses * weights[:, None]).mean()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(WORDS, (24, 12), generator=generator), 0.5 + torch.rand(
        24, generator=generator
    )


def plain():
    torch.manual_seed(0)
    return Model()


def laid_out(mesh, layout, **options):
    """layout: "dp", "fsdp", "tp" or "2d"."""
    model = plain()
    rows = "data" if layout in ("fsdp", "2d") else None
    hidden = "model" if layout in ("tp", "2d") and "model" in mesh.names else None
    for name, parameter in model.named_parameters():
        spec = [rows, *[None] * (parameter.dim() - 1)]
        if name.endswith("up.weight"):
            spec = [hidden, rows] if hidden else spec
        elif name.endswith("up.bias"):
            spec = [hidden or rows]
        elif name.endswith("down.weight"):
            spec = [rows, hidden]
        gspmd.mark_sharding(parameter, mesh, tuple(spec))
    return gspmd.parallelize(
        model,
        mesh,
        in_specs=("data _", "data") if "data" in mesh.names else None,
        **{"param_dtype": BF16, "reduce_dtype": F32} | options,
    )


class Casts(nn.Module):
    """The same casts on one process."""

    def __init__(self, dtype=BF16):
        super().__init__()
        self.model, self.dtype = plain(), dtype

    def forward(self, tokens, weights):
        halves = {n: p.to(self.dtype) for n, p in self.model.named_parameters()}
        return functional_call(self.model, halves, (tokens, weights.to(self.dtype)))


def compare(model, reference, local=None, terms=8, steps=3):
    """Losses and gradients of AdamW steps, and weights after them.

    A gradient is off by `terms` roundings of its largest element at most, and an update by the
    share of that in AdamW's eps, which is large for that reason. local: the rows of the reference.
    """
    rate, eps = 1e-2, 0.1
    optimizers = [torch.optim.AdamW(m.parameters(), rate, eps=eps) for m in (model, reference)]
    bounds = dict.fromkeys(dict(model.named_parameters()), 0.0)
    for step in range(steps):
        tokens, weights = batch(step)
        rows = slice(None) if local is None else local
        losses = [model(tokens, weights), reference(tokens[rows], weights[rows])]
        for loss in losses:
            loss.backward()
        if local is not None:
            losses[1] = losses[1].detach()
            dist.all_reduce(losses[1])
            losses[1] /= dist.get_world_size()
        assert losses[0].dtype == losses[1].dtype == F32
        close(*losses, tolerance=2 * EPS)
        for (name, mine), theirs in zip(model.named_parameters(), reference.parameters()):
            assert mine.dtype == mine.grad.dtype == theirs.grad.dtype == F32
            close(mine.grad, theirs.grad, terms * EPS)
            bounds[name] += rate * terms * EPS * float(whole(theirs.grad).abs().max()) / eps
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters()):
        error = (whole(mine) - whole(theirs)).abs().max().item()
        assert error <= bounds[name], (name, error, bounds[name])
    return optimizers[0]


def dtypes(model):
    """The dtypes of gathers and of reductions of more than one number."""
    return {
        kind: {c.dtype for c in model.plan.collectives if c.kind == kind and c.payload_bytes > 8}
        for kind in ("all_gather", "reduce_scatter")
    }


@distributed("data=4")
def test_as_fsdp2(mesh):
    """Four processes with FSDP2 under its MixedPrecisionPolicy, each with its rows of the batch."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
    devices = init_device_mesh("cpu", (4,))
    reference = plain()
    for block in reference.blocks:
        fully_shard(block, mesh=devices, mp_policy=policy)
    fully_shard(reference, mesh=devices, mp_policy=policy)
    model = laid_out(mesh, "fsdp")
    compare(model, reference, slice(6 * dist.get_rank(), 6 * dist.get_rank() + 6))
    assert dtypes(model) == {"all_gather": {"bf16"}, "reduce_scatter": {"f32"}}


@distributed("data=4", "data=3")
def test_data_parallel(mesh):
    compare(laid_out(mesh, "dp"), Casts())


@distributed("model=3", "data=2,model=2")
def test_tensor_parallel(mesh):
    compare(laid_out(mesh, "tp"), Casts(), terms=16)


@distributed("data=2,model=2")
def test_both_axes_on_weights(mesh):
    """And master weights, gradients and states of optimizers in float32, also in checkpoints."""
    model = laid_out(mesh, "2d")
    optimizer = compare(model, Casts(), terms=16)
    assert {t.dtype for t in model.state_dict().values()} == {F32}
    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, DTensor)]
    assert len(states) == 2 * len([*model.parameters()]) and {t.dtype for t in states} == {F32}
    other = laid_out(mesh, "2d")
    other.load_state_dict(model.state_dict())
    close(other(*batch(7)), model(*batch(7)), 0.0)


@distributed("data=2")
def test_inductor(mesh):
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4), torch.randn(16, 8)
    reference = copy.deepcopy(model).to(BF16)
    gspmd.mark_sharding(model.weight, mesh, "data _")
    module = gspmd.parallelize(
        model,
        mesh,
        backend="inductor",
        in_specs="data _",
        param_dtype=BF16,
        reduce_dtype=F32,
    )
    for m in (module, reference):
        m(x.to(BF16)).sum().backward()
    for mine, theirs in zip(module.parameters(), reference.parameters()):
        assert mine.grad.dtype == F32
        close(mine.grad, theirs.grad.to(F32), 4 * EPS)


@distributed("data=4")
def test_autocast(mesh):
    """reduce_dtype alone: gradients computed under autocast are summed in float32."""
    model, reference = laid_out(mesh, "fsdp", param_dtype=None), plain()
    with torch.autocast("cpu", BF16):
        losses = model(*batch(0)), reference(*batch(0))
    for loss in losses:
        loss.backward()
    close(*losses, tolerance=2 * EPS)
    for mine, theirs in zip(model.parameters(), reference.parameters()):
        close(mine.grad, theirs.grad, 8 * EPS)
    assert dtypes(model)["reduce_scatter"] == {"f32"}


@distributed("data=4", "data=2,model=2")
def test_scaler(mesh):
    """Float16 with a GradScaler: a step that overflows on one process is left out on all."""
    model, reference = laid_out(mesh, "2d", param_dtype=F16), Casts(F16)
    before = [whole(p).clone() for p in model.parameters()]
    scales = []
    for m in (model, reference):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-30)
        optimizer = torch.optim.SGD(m.parameters(), 0.1)
        for step in range(3):
            scaler.scale(m(*batch(step))).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if m is model and step == 0:
                assert all(torch.equal(whole(p), b) for p, b in zip(m.parameters(), before))
            scales.append(scaler.get_scale())
    assert scales[:3] == scales[3:] == [2.0**10] * 3, scales
    for mine, theirs, b in zip(model.parameters(), reference.parameters(), before):
        assert not torch.equal(whole(mine), b)
        close(whole(mine) - b, theirs.detach() - b, 32 * torch.finfo(F16).eps)


@distributed("data=2")
def test_a_submodule_called_directly(mesh):
    model, x = laid_out(mesh, "fsdp"), torch.ones(4, WIDTH)
    got = model.blocks[0](x)
    block = copy.deepcopy(plain().blocks[0]).to(BF16)
    assert got.dtype == BF16
    close(got, block(x.to(BF16)), 8 * EPS)
