"""A GPT whose every second block has experts in the place of its feed-forward layer.

Letters in the comments: b batch, s sequence, m model width, e experts, k choices of a token, c
places that an expert has for one sequence (its capacity), h hidden width of an expert, r rows, of
which each is a choice of a token. The rest is the GPT of examples/gpt, and so are the names of
dimensions.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgspmd import Layout, Mesh, annotate, mark_sharding, moe

sys.path.append(str(Path(__file__).resolve().parent.parent))
from gpt.model import DP, GPT, Block
from gpt.model import Config as GPTConfig

# ------------------------------------------------------------------------------------------ layouts

# Where the experts are, the batch is not: the name that comes first has the axis.
EXPERT = Layout({"expert": "expert"})

# Expert parallel: the batch is sharded along `expert`, but inside of the experts' layers, where
# each device has some of the experts.
EP = EXPERT | DP | Layout({"batch": "expert"})

# Groups of devices along `data`, each with all experts; the batch is sharded over all devices.
DP_EP = EXPERT | DP | Layout({"batch": ("data+expert", "data")})

# Expert parallel, and each layer tensor parallel, as Megatron's: a device has some hidden units of
# each of its experts.
EP_TP = EP | Layout({"heads": "model", "hidden": "model", "words": "model"})

LAYOUTS = {"ep": EP, "dp_ep": DP_EP, "ep_tp": EP_TP}


# -------------------------------------------------------------------------------------------- model


@dataclass(frozen=True)
class Config(GPTConfig):
    experts: int = 8
    choices: int = 2  # how many experts a token is sent to
    router: str = "capacity"  # or dropless
    capacity: float = 1.25  # places of an expert, relative to what it needs if all have as many
    room: float = 0  # of dropless: for rows from a device to another, over the even share; 0: all
    shards: int = 1  # how many devices have different experts,
    groups: int = 1  # and how many have the same
    expert_hidden: int = 0  # of one expert; 0: 2 x width
    balance: float = 0.01  # weight of the loss that keeps the loads of experts equal
    z: float = 0.001  # weight of the loss that keeps the logits of the router small


class Routing(NamedTuple):
    """What an expert layer reports besides its result."""

    loss: Tensor  # a scalar: both auxiliary losses, over all tokens
    loads: Tensor  # [e] tokens that chose each expert
    dropped: Tensor  # a scalar: choices for which there was no place


class Router(nn.Module):
    """x [b, s, m] -> which experts a token is sent to, and the weight of each."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.randn(config.experts, config.width) * 0.02)  # [e, m]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        config = self.config
        wide = torch.promote_types(
            x.dtype, torch.float32
        )  # halves are too coarse for small differences
        logits = F.linear(x.to(wide), self.weight.to(wide))  # [b, s, e]
        odds = logits.softmax(-1)
        weights, chosen = odds.topk(config.choices, -1)  # [b, s, k]
        weights = weights / weights.sum(-1, keepdim=True)
        loads = F.one_hot(chosen, config.experts).sum((0, 1, 2))  # [e]
        share = loads / chosen.numel()
        balance = config.experts * (share * odds.mean((0, 1))).sum()
        z = logits.logsumexp(-1).square().mean()
        return weights, chosen, loads, config.balance * balance + config.z * z


class Experts(nn.Module):
    """x [b, s, m] -> y [b, s, m], and what became of the choices."""

    def __init__(self, config: Config):
        super().__init__()
        width, hidden, std = config.width, config.expert_hidden or 2 * config.width, 0.02
        self.config, self.router = config, Router(config)
        self.up = nn.Parameter(torch.randn(config.experts, width, hidden) * std)  # [e, m, h]
        self.down = nn.Parameter(
            torch.randn(config.experts, hidden, width) * std / math.sqrt(2 * config.layers)
        )  # [e, h, m]
        mark_sharding(self.up, "expert embed hidden")
        mark_sharding(self.down, "expert hidden embed")


class DroplessExperts(Experts):
    """Experts that compute all rows that come to them, sorted by expert.

    With room for so many rows from a device to another, rows are sent, else all tokens of a group.
    """

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:  # [b, s, m]
        weights, chosen, loads, loss = self.router(x)
        config = self.config
        cut = {"shards": config.shards, "groups": config.groups, "capacity": config.room or None}
        routed = moe.dispatch(x, chosen, config.experts, **cut)
        y = F.gelu(moe.grouped_mm(routed.rows, self.up, routed.ends))  # [r, h]
        y = moe.grouped_mm(y, self.down, routed.ends)  # [r, m]
        return moe.combine(y, routed, weights.to(x.dtype)), Routing(loss, loads, routed.dropped)


class CapacityExperts(Experts):
    """Experts with a fixed number of places for each sequence (GShard, arXiv 2006.16668).

    All is a product with tensors of zeros and ones. A choice that comes after as many others as an
    expert has places is dropped: the token passes this expert by, on the residual stream.
    """

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:  # [b, s, m]
        weights, chosen, loads, loss = self.router(x)
        places = self.places(chosen, x.shape[1])  # [b, s, k, e, c]
        sent = places.sum(2).to(x.dtype)  # [b, s, e, c]
        weighted = torch.einsum("bskec,bsk->bsec", places.to(x.dtype), weights.to(x.dtype))
        y = torch.einsum("bsec,bsm->ebcm", sent, x)
        y = mark_sharding(y, "expert batch _ _")
        y = F.gelu(torch.einsum("ebcm,emh->ebch", y, self.up))
        y = mark_sharding(torch.einsum("ebch,ehm->ebcm", y, self.down), "expert batch _ _")
        y = torch.einsum("bsec,ebcm->bsm", weighted, y)
        return y, Routing(loss, loads, chosen.numel() - places.sum())

    def places(self, chosen: Tensor, length: int) -> Tensor:  # [b, s, k] -> [b, s, k, e, c]
        """Return where each choice of a token is: first choices come before all second ones."""
        config = self.config
        count = math.ceil(config.capacity * config.choices * length / config.experts)
        taken = F.one_hot(chosen.transpose(1, 2), config.experts)  # [b, k, s, e]
        before = taken.flatten(1, 2).cumsum(1).view_as(taken) - taken  # [b, k, s, e]
        place = torch.arange(count, device=chosen.device)
        return ((before[..., None] == place) & (taken[..., None] > 0)).transpose(1, 2)


ROUTERS = {"capacity": CapacityExperts, "dropless": DroplessExperts}


class ExpertBlock(Block):
    def __init__(self, config: Config):
        super().__init__(config)
        self.feed_forward = ROUTERS[config.router](config)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:  # x [b, s, m]
        x = mark_sharding(x + self.attention(self.norm1(x)), "batch stream width")
        y, routing = self.feed_forward(self.norm2(x))
        return mark_sharding(x + y, "batch stream width"), routing


class MoE(GPT):
    """tokens [b, s] -> logits [b, s, v], or with targets [b, s] the mean loss, the loads of experts
    [layers of experts, e] and how many choices were dropped.
    """

    def __init__(self, config: Config):
        super().__init__(config)
        self.blocks = nn.ModuleList(
            ExpertBlock(config) if i % 2 else Block(config) for i in range(config.layers)
        )

    def forward(self, tokens: Tensor, targets: Tensor | None = None):  # [b, s], [b, s]
        x, routings = self.embed(tokens), []
        for block in self.blocks:
            if isinstance(block, ExpertBlock):
                x, routing = block(x)
                routings.append(routing)
            else:
                x = block(x)
        if targets is None:
            return self.predict(x, None)
        loss = self.predict(x, targets) + torch.stack([r.loss for r in routings]).mean()
        loads = torch.stack([r.loads for r in routings])  # [layers, e]
        return loss, loads, torch.stack([r.dropped for r in routings]).sum()


def cut(mesh: Mesh | None) -> dict[str, int]:
    """How many devices have different experts, and how many groups of such devices there are."""
    sizes = dict(mesh.axes) if mesh else {}
    return {"shards": sizes.get("expert", 1), "groups": sizes.get("data", 1)}


def example(
    mesh: Mesh,
    layout: str = "ep",
    batch: int = 64,
    context: int = 1024,
    layers: int = 4,
    heads: int = 16,
    width: int = 1024,
    experts: int = 64,
    expert_hidden: int = 0,
    router: str = "capacity",
    room: float = 0,
    vocabulary: int = 32000,
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and a batch for `python -m torchgspmd plan`, in bfloat16."""
    routing = {"experts": experts, "router": router, "room": room, **cut(mesh)}
    config = Config(
        vocabulary, context, layers, heads, width, expert_hidden=expert_hidden, **routing
    )
    tokens = torch.zeros(batch, context, dtype=torch.long)
    return annotate(MoE(config).bfloat16(), LAYOUTS[layout].on(mesh)), (tokens, tokens)
