"""Flattened dimensions that keep their shards, on processes: training, and the bytes of a step."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from ranks import distributed
from tied_model import close
from torch import Tensor, nn

import torchgspmd as gspmd

WIDTH, WORDS = 8, 24


class Model(nn.Module):
    """Tokens for two experts, and a loss over all tokens, as training scripts have them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gate = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.table(words)
        tokens = x.view(-1, WIDTH)
        weights = self.gate(tokens).softmax(-1)
        mixed = sum(weights[:, i, None] * expert(tokens) for i, expert in enumerate(self.experts))
        logits = self.head(F.gelu(mixed).view(x.shape) + x)
        return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1))


@distributed("seq=2", "seq=3", "data=2,seq=2")
def test_flattened_tokens_train(mesh):
    torch.manual_seed(0)
    reference = Model()
    spec = "data seq" if "data" in mesh.names else "_ seq"
    model = gspmd.parallelize(copy.deepcopy(reference), mesh, in_specs=(spec, spec))
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, reference)]
    for step in range(3):
        torch.manual_seed(step)
        words = torch.randint(WORDS, (4, 12))
        losses = []
        for m, optimizer in zip((model, reference), optimizers):
            losses.append(m(words, words))
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        close(*losses)
    for name, parameter in reference.named_parameters():
        close(model.get_parameter(name), parameter, 1e-3)  # AdamW divides by small second moments
    plan = gspmd.plan(reference, words, words, mesh=mesh, in_specs=(spec, spec), grad=True)
    # Gradients of weights, and the label that the first token of the next device's rows has.
    assert {c.kind for c in plan.collectives} == {"all_reduce", "permute"}
