"""DiLoCo: islands train by themselves and synchronize each n steps over a slow axis.

    python train.py --processes 4 --islands 2 --every 8 --wire bfloat16
    python train.py --islands 2 --every 8           one process

Source: Douillard et al., DiLoCo, arXiv 2311.08105.
"""

import argparse
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import torchgspmd as gspmd

WORDS, WIDTH, LENGTH = 96, 32, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):  # [b, s, m]
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        x = x + self.mix(past)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, tokens, targets):  # [b, s]
        logits = self.head(self.blocks(self.embed(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Islands(nn.Module):
    """Copies of a model with weights of their own: each weight is [islands, ...]."""

    def __init__(self, model, islands):
        super().__init__()
        self.model = model
        for name, weight in [*model.named_parameters()]:
            owner, _, last = name.rpartition(".")
            copies = weight.detach().expand(islands, *weight.shape).clone()
            setattr(model.get_submodule(owner), last, nn.Parameter(copies))

    def forward(self, *batch):  # [islands, b, s] each
        def alone(weights, *rows):
            return torch.func.functional_call(self.model, weights, rows)

        losses = torch.vmap(alone, randomness="different")(
            dict(self.model.named_parameters()), *batch
        )
        self.losses = losses.detach()
        return losses.sum()  # each island's gradient is that of its own loss


class DiLoCo(nn.Module):
    """A step of all islands, and at `synchronize` one of the weights that they have in common."""

    def __init__(self, islands, optimizer, lr=0.7, momentum=0.9, wire=torch.float32):
        super().__init__()
        self.islands, self.step = islands, gspmd.train_step(islands, optimizer)
        self.lr, self.momentum, self.wire = lr, momentum, wire
        for i, weight in enumerate(islands.parameters()):
            self.register_buffer(f"common{i}", weight.detach()[0].clone())
            self.register_buffer(f"speed{i}", torch.zeros_like(weight[0]))

    def forward(self, tokens, targets, synchronize):
        self.step(tokens, targets)  # the sum of all losses, which would be a barrier, is not read
        if synchronize:
            with torch.no_grad():
                for i, weight in enumerate(self.islands.parameters()):
                    self.outer(weight, getattr(self, f"common{i}"), getattr(self, f"speed{i}"))
        return self.islands.losses

    def outer(self, weight, common, speed):
        """Nesterov's step for the mean of the islands' differences, which all of them take."""
        difference = (common - weight).to(self.wire).mean(0).to(common.dtype)
        speed.mul_(self.momentum).add_(difference)
        common.sub_(self.lr * (difference + self.momentum * speed))
        weight.copy_(common.expand_as(weight))


def mark(step, mesh):
    """Divide copies over the islands, and each copy and the common weights over an island."""
    for weight in step.islands.parameters():
        gspmd.mark_sharding(weight, mesh, "island data" + " _" * (weight.dim() - 2))
    for buffer in step.buffers(recurse=False):
        gspmd.mark_sharding(buffer, mesh, "data" + " _" * (buffer.dim() - 1))


def make(islands, wire="float32"):
    torch.manual_seed(0)
    copies = Islands(Model(), islands)
    optimizer = torch.optim.AdamW(copies.parameters(), lr=3e-3)
    return DiLoCo(copies, optimizer, wire=getattr(torch, wire)), optimizer


def batch(number, islands, rows):
    """Return a step's tokens and targets, [islands, b, s]: islands draw different ones."""
    draw = torch.Generator().manual_seed(number)
    words = torch.randint(WORDS, (islands, rows, LENGTH + 1), generator=draw)
    words[..., 1::2] = words[..., :LENGTH:2]  # something to be learned
    return words[..., :-1].contiguous(), words[..., 1:].contiguous()


def train(job, args):
    """Train on a job's processes; without a job, in this process."""
    step, optimizer = make(args.islands, args.wire)
    numbers = range(args.steps)
    if job:
        # Islands stay the same on other numbers of processes, as after the loss of a host.
        hosts = math.gcd(args.islands, job.processes)
        mesh = gspmd.Mesh(island=hosts, data=job.processes // hosts)
        mark(step, mesh)
        step = gspmd.parallelize(
            step, mesh, in_specs=("island data _",) * 2 + (None,), out_specs="same"
        )
        numbers = job.steps(step, optimizer, total=args.steps)
    for number in numbers:
        synchronize = (number + 1) % args.every == 0
        losses = step(*batch(number, args.islands, args.batch), synchronize)
        if synchronize:
            if isinstance(losses, DTensor):  # of several islands
                losses = losses.full_tensor()
            if not job or dist.get_rank() == 0:
                print(f"step {number + 1}: loss {float(losses.mean()):.5f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=0, help="of this host; 0: no job")
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--every", type=int, default=8, help="steps between synchronizations")
    parser.add_argument("--batch", type=int, default=8, help="rows of an island")
    parser.add_argument("--wire", default="float32", help="dtype of the differences that are sent")
    parser.add_argument("--folder", default="run", help="of the checkpoints")
    args = parser.parse_args()
    if args.processes:
        gspmd.elastic(train, args.processes, args, folder=args.folder, every=args.every)
    else:
        train(None, args)


if __name__ == "__main__":
    main()
