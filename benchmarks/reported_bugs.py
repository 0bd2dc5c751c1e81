"""Programs of public reports of silent bugs, and the results that other systems give for them.

Written anew. A function of whole tensors is a program for one device. One whose first argument is a
mesh runs on each process: by a system of torch, or by hand, with the collectives that a report
describes for a project that is not installed here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

# By another system: takes the mesh and all arguments whole, on each process.
Other = Callable[..., Tensor]
SMOOTHING = 0.1


def drawn(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    def draw() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        return tuple(torch.randn(shape, generator=generator) for shape in shapes)

    return draw


def gradient(loss: Callable[..., Tensor], of: int = 0) -> Callable[..., Tensor]:
    """Return the function that gives a loss's gradient for one of its arguments."""

    def function(*arguments: Tensor) -> Tensor:
        taken = [x.detach().requires_grad_(i == of) for i, x in enumerate(arguments)]
        return torch.autograd.grad(loss(*taken), taken[of])[0]

    return function


# ------------------------------------------------------------------------ the programs of reports


def mine(mesh: DeviceMesh, x: Tensor, dim: int = 0) -> Tensor:
    """Return this process's shard."""
    return x.chunk(mesh.size(), dim)[mesh.get_local_rank()]


def summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum over all processes, outside of autograd."""
    x = x.detach().clone()
    dist.all_reduce(x, group=mesh.get_group())
    return x


def put(x: Tensor, values: Tensor) -> Tensor:
    """Write numbers on a diagonal."""
    rows = torch.arange(x.shape[0])
    if isinstance(x, DTensor):
        rows = distribute_tensor(rows, x.device_mesh, [Replicate()])
    return x.index_put((rows, rows), values)


def scaled(x: Tensor) -> Tensor:
    """Scale one sum by two numbers."""
    total = x.sum()
    return torch.stack(
        [(total * i).full_tensor() if isinstance(x, DTensor) else total * i for i in (1, 2)]
    )


def preference(logits: Tensor, weights: Tensor) -> Tensor:
    """Weight log-probabilities, as losses of preferences do."""
    return (F.log_softmax(logits, -1) * weights).sum()


def linear(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w.t()).square().sum()


def by_fsdp_and_columns(mesh: DeviceMesh, w: Tensor, x: Tensor) -> Tensor:
    """Shard five rows over both axes, as torch composes FSDP2 and ColwiseParallel."""
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False)
    layer.weight = nn.Parameter(w.clone())
    parallelize_module(layer, mesh["model"], ColwiseParallel(use_local_output=False))
    fully_shard(layer, mesh=mesh["data"])
    y = layer(mine(mesh["data"], x))
    assert isinstance(y, DTensor)
    loss = y.full_tensor().square().sum()
    (loss * mesh["data"].size()).backward()  # FSDP2 takes the mean over processes
    assert isinstance(layer.weight.grad, DTensor)
    return layer.weight.grad.full_tensor()


def expert(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    """One feed-forward layer whose second product is summed over devices."""
    return torch.relu(x @ up) @ down + bias


def bias_on_each(mesh: DeviceMesh, x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return summed(expert(x, mine(mesh, up, 1), mine(mesh, down), bias), mesh)


def mixture(router: Tensor, x: Tensor, experts: Tensor) -> Tensor:
    shares = torch.softmax(x @ router, -1)  # [tokens, experts]
    return torch.einsum("te,td,edk->tk", shares, x, experts).square().sum()


def own_experts(mesh: DeviceMesh, router: Tensor, x: Tensor, experts: Tensor) -> Tensor:
    """Each process has the router's gradient by its experts, which nobody sums."""
    router = router.clone().requires_grad_()
    shares = mine(mesh, torch.softmax(x @ router, -1), 1)
    y = torch.einsum("te,td,edk->tk", shares, x, mine(mesh, experts))
    return torch.autograd.grad(y, router, 2 * summed(y, mesh))[0]


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, label_smoothing=SMOOTHING)


def smoothed_in_shards(mesh: DeviceMesh, logits: Tensor, labels: Tensor) -> Tensor:
    """The mean log-probability is that of the words on this process."""
    losses = -F.log_softmax(logits, -1)
    target = losses.gather(-1, labels[:, None]).squeeze(-1)
    return ((1 - SMOOTHING) * target + SMOOTHING * mine(mesh, losses, -1).mean(-1)).mean()


def gathered_as_shards(mesh: DeviceMesh, logits: Tensor, labels: Tensor) -> Tensor:
    """Every process has all words, and their exponentials are summed over processes."""
    total = summed(logits.exp().sum(-1), mesh).log()
    return (total - logits.gather(-1, labels[:, None]).squeeze(-1)).mean()


def by_megatron(smoothing: float = 0.0, are_gathered: bool = False) -> Other:
    """Return the loss by Megatron Core, whose vocabulary is sharded, on the first process."""

    def other(mesh: DeviceMesh, logits: Tensor, labels: Tensor) -> Tensor:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(mesh.size())
        words = logits.shape[-1]
        part = logits if are_gathered else mine(mesh, logits, -1)
        # Its smoothing leaves the target's own share out.
        share = smoothing * (words - 1) / words
        return vocab_parallel_cross_entropy(part.clone()[None], labels[None], share).mean()

    return other


def two_losses(w: Tensor, x: Tensor, kept: Tensor) -> Tensor:
    """A loss of all tokens, and the mean of another one over some tokens."""
    y = x @ w
    return y.square().mean() + (y.sin() * kept).sum() / kept.sum()


def mean_of_kept(w: Tensor, x: Tensor, kept: Tensor) -> Tensor:
    return ((x @ w).square() * kept).sum() / kept.sum().clamp(min=1)


def local_counts(loss: Callable[..., Tensor]) -> Other:
    """Return the gradient by DDP, if each process divides by its own count."""

    def other(mesh: DeviceMesh, w: Tensor, x: Tensor, kept: Tensor) -> Tensor:
        model = Held(w)
        wrapped = DistributedDataParallel(model, process_group=mesh.get_group())
        wrapped(loss, mine(mesh, x), mine(mesh, kept)).backward()
        assert model.w.grad is not None
        return model.w.grad

    return other


class Held(nn.Module):
    """A weight, for systems that wrap modules."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w.clone())

    def forward(self, loss: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
        return loss(self.w, *arguments)


def stored_and_recomputed(w: Tensor, x: Tensor) -> Tensor:
    """Compute a layer again in the backward, from its stored input."""
    return checkpoint(lambda y: (y @ w).sin(), x, use_reentrant=False).square().sum()


def gathered_over_another_axis(mesh: DeviceMesh, w: Tensor, x: Tensor) -> Tensor:
    """The stored input is scattered over `model`, and gathered over `data`."""
    rows = mine(mesh["data"], x)
    stored = mine(mesh["model"], rows)
    parts = [torch.empty_like(stored) for _ in range(2)]
    dist.all_gather(parts, stored.contiguous(), group=mesh["data"].get_group())
    slope = 2 * (rows @ w).sin()  # of the layer's result, by the forward
    w, again = w.clone().requires_grad_(), torch.cat(parts)
    return summed(torch.autograd.grad((again @ w).sin(), w, slope)[0], mesh["data"])


def with_sink(sinks: Tensor, scores: Tensor, values: Tensor) -> Tensor:
    """Attention whose softmax has one more score for each head: [h], [h, s, t], [h, t, d]."""
    sink = sinks[:, None, None].expand(-1, scores.shape[1], 1)
    shares = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return (shares @ values).square().sum()


def norm_of_gradient(sinks: Tensor, scores: Tensor, values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient(with_sink)(sinks, scores, values))


def counted_as_copies(mesh: DeviceMesh, *arguments: Tensor) -> Tensor:
    """The sinks of one process stand for all: their parameter is not marked as sharded."""
    return norm_of_gradient(*(mine(mesh, x) for x in arguments))


def balance(router: Tensor, x: Tensor, kept: Tensor) -> Tensor:
    """A loss that balances experts, over the tokens that are no padding."""
    shares = torch.softmax(x @ router, -1) * kept
    return (shares.sum(0) / kept.sum()).square().sum()


def count_of_all_for_own(mesh: DeviceMesh, router: Tensor, x: Tensor, kept: Tensor) -> Tensor:
    """A gradient that is scaled by this process's tokens is scaled by those of all."""
    correct, own = gradient(balance)(router, x, kept), mine(mesh, kept).sum()
    return correct * summed(own, mesh) / own


def gated_norm(w: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """Heads share the weight of one norm: [d], [t, h, d], [t, h, d]."""
    return (F.rms_norm(x, x.shape[-1:]) * w * gate).sin().sum()


def own_heads(mesh: DeviceMesh, w: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """Each process has the gradient by its heads, which nobody sums."""
    return gradient(gated_norm)(w, mine(mesh, x, 1), mine(mesh, gate, 1))


def labelled() -> tuple[Tensor, Tensor]:
    return drawn((8, 16))()[0], torch.arange(8) * 2


def masked(*counts: int) -> Callable[[], tuple[Tensor, ...]]:
    """Draw a weight and 12 rows; each of four shards keeps so many of its three."""

    def draw() -> tuple[Tensor, ...]:
        w, x = drawn((4, 4), (12, 4))()
        kept = torch.cat([torch.arange(3) < count for count in counts])
        return w, x, kept.float()[:, None]

    return draw
