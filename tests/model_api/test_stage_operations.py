"""Operations in the blocks of a pipeline with its loss: torch.vmap maps them over the stages."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardingError

ROWS, LENGTH, WIDTH, GROUPS = 8, 4, 16, 4


def order(x):
    """Return the order of all positions by their values."""
    return x.sum(-1).reshape(-1).argsort()


def flat(x):
    return x.reshape(-1, WIDTH)


def heads(x, count=4):
    return x[..., : 4 * count].unflatten(-1, (count, 4)).transpose(1, 2)


def grouped(x, w, ends):
    product = getattr(F, "grouped_mm", torch._grouped_mm)
    return product(x, w, offs=ends)


def experts(m, x):
    """Experts as torchtitan and transformers write them."""
    rows = flat(x)
    weights, chosen = rows[:, :GROUPS].softmax(-1).topk(2)
    places = chosen.flatten().argsort()
    counts = torch.histc(chosen.flatten().float(), bins=GROUPS, min=0, max=GROUPS - 1)
    ends = counts.cumsum(0).int()
    y = grouped(rows[places // 2], m.experts, ends) * weights.flatten()[places, None]
    return torch.zeros_like(rows).index_add(0, places // 2, y).view_as(x)


def experts_by_hand(m, x):
    """The same on one device: a product for each group, since PyTorch's takes bfloat16 alone."""
    rows = flat(x)
    weights, chosen = rows[:, :GROUPS].softmax(-1).topk(2)
    y = torch.zeros_like(rows)
    for group, w in enumerate(m.experts):
        y = y + (rows @ w) * (weights * (chosen == group)).sum(-1, keepdim=True)
    return y.view_as(x)


def last(x):
    """Each row's entry at a place of its own, as pooling at the last word."""
    return x[torch.arange(len(x)), x.sum(-1).argmax(-1)][:, None]


class Own(torch.autograd.Function):
    """Saves an argument, a result and a value of its own; has a number and two results."""

    @staticmethod
    def forward(ctx, x, w, power):
        product = x @ w
        y = product.tanh()
        ctx.save_for_backward(w, product.square(), y, x)
        ctx.power = power
        ctx.mark_non_differentiable(signs := y.sign())
        return y * power, y, signs

    @staticmethod
    def backward(ctx, of_scaled, of_y, _):
        w, square, y, x = ctx.saved_tensors
        of_product = (of_scaled * ctx.power + of_y) * (1 - y * y) + 0 * square
        of_w = x.flatten(0, -2).mT @ of_product.flatten(0, -2)
        return of_product @ w.mT, of_w, None


class Doubled(torch.autograd.Function):
    """Has a setup_context, and no rule for torch.vmap; its gradient is another than autograd's."""

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient * ctx.saved_tensors[0]


def own(m, x):
    scaled, y, signs = Own.apply(x, m.table, 3.0)
    return scaled + y + x * signs


TABLES = {
    "index_add": lambda m, x: torch.zeros_like(flat(x)).index_add(0, order(x), flat(x)).view_as(x),
    "index_add, alpha": lambda m, x: x.index_add(1, torch.arange(LENGTH).int(), x, alpha=2),
    "index_add_": lambda m, x: (
        torch.zeros_like(flat(x)).index_add_(0, order(x), flat(x)).view_as(x)
    ),
    "embedding": lambda m, x: F.embedding(x.argmax(-1), m.table),
    "embedding, padding": lambda m, x: F.embedding(x.argmax(-1), m.table, padding_idx=-1),
    "histc": lambda m, x: x * torch.histc(x.detach(), bins=4, min=-1, max=1)[0],
    "scatter_": lambda m, x: x * torch.zeros_like(x).scatter_(-1, x.topk(2)[1], 1),
    "scatter_, source": lambda m, x: (
        torch.zeros_like(x).scatter_(dim=1, index=x.argsort(1), src=x.detach()) + x
    ),
    "scatter_, product": lambda m, x: (
        x * torch.full_like(x, 2).scatter_(-1, x.topk(2)[1], 3.0, reduce="multiply")
    ),
    "experts": experts,
    "LSTM": lambda m, x: m.lstm(x)[0],
    "GRU": lambda m, x: m.gru(x)[0],
    "last": lambda m, x: last(x),
    "pairs": lambda m, x: x[torch.arange(len(x))[:, None], x.argsort(1)[..., 0]],
}
OTHERS = {
    "index": lambda m, x: flat(x)[order(x)].view_as(x),
    "index_put": lambda m, x: torch.zeros_like(flat(x)).index_put((order(x),), flat(x)).view_as(x),
    "weights": lambda m, x: torch.einsum("btd,btde->bte", x, m.experts[x.argmax(-1) % GROUPS]),
    "gather": lambda m, x: x.gather(1, x.argsort(1)),
    "scatter_add": lambda m, x: torch.zeros_like(x).scatter_add(1, x.argsort(1), x),
    "sort": lambda m, x: x.sort(1)[0],
    "rms_norm": lambda m, x: F.rms_norm(x, (WIDTH,), m.table[0]),
    "convolution": lambda m, x: F.conv1d(x.mT, m.kernel, padding=1).mT,
    "rotary": lambda m, x: torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * (0.6 + 0.8j)
    ).flatten(-2),
    "attention": lambda m, x: m.attention(x, x, x)[0],
    "grouped heads": lambda m, x: (
        F.scaled_dot_product_attention(heads(x), heads(x, 2), heads(x, 2), enable_gqa=True)
        .transpose(1, 2)
        .flatten(2)
    ),
    "relative positions": lambda m, x: F.scaled_dot_product_attention(
        x, x, x, attn_mask=m.table[0][torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)]
    ),
    "transform": lambda m, x: torch.fft.irfft(torch.fft.rfft(x, dim=1), n=LENGTH, dim=1),
    "solve": lambda m, x: torch.linalg.solve(x @ x.mT + torch.eye(LENGTH).to(x), x),
    "cumsum": lambda m, x: x.cumsum(1),
    "windows": lambda m, x: x.roll(-1, 1).unflatten(1, (2, 2)).flatten(1, 2),
    "Function": own,
    "Function for torch.func": lambda m, x: Doubled.apply(x),
    "router": lambda m, x: torch.zeros_like(x).scatter(-1, x.topk(2)[1], x.topk(2)[0]),
}


class Block(nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.operation = operation
        self.up, self.table = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.experts = nn.Parameter(torch.randn(GROUPS, WIDTH, WIDTH) / 4)
        self.kernel = nn.Parameter(torch.randn(WIDTH, WIDTH, 3) / 4)
        self.lstm, self.gru = (c(WIDTH, WIDTH, batch_first=True) for c in (nn.LSTM, nn.GRU))
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x):
        return (x + self.operation(self, torch.tanh(self.up(x)))) / 2


class Net(nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.layers = nn.ModuleList(Block(operation) for _ in range(4))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).view(-1, 8), labels.view(-1))


def staged(operation, mesh, truth=None):
    """Return a step's result and gradients in stages, and those of one microbatch after another."""
    torch.manual_seed(0)
    model = Net(truth or operation).double()
    x, labels = torch.randn(ROWS, LENGTH, WIDTH).double(), torch.randint(8, (ROWS, LENGTH))
    parts = ([each[i::2].contiguous() for each in (x, labels)] for i in range(2))
    torch.stack([model(*part) for part in parts]).mean().backward()
    copied = copy.deepcopy(model)
    for layer in copied.layers:
        layer.operation = operation
    pipelined = gspmd.pipeline_model(copied, "layers", mesh, microbatches=2, schedule="1f1b")
    specs = ("data _ _", "data _")
    plan = gspmd.plan(pipelined, x, labels, mesh=mesh, in_specs=specs, grad=True)
    return plan.simulate(x, labels)[1], model


def check(operation, truth=None):
    gradients, model = staged(operation, Mesh(data=2, stage=2), truth)
    torch.testing.assert_close(gradients["head.weight"], model.head.weight.grad)
    for name, one in model.layers[0].named_parameters():
        if one.grad is not None:
            expected = torch.stack([layer.get_parameter(name).grad for layer in model.layers])
            found = gradients[f"layers.block.{name}"]
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-11)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TABLES)
def test_each_stage_has_its_own_rows(name):
    check(TABLES[name], experts_by_hand if name == "experts" else None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_operations(name):
    check(OTHERS[name])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "operation, words",
    [
        # A stage has several layers, so these are in a loop in it.
        (lambda m, x: x + x.quantile(0.5, dim=1, keepdim=True), "of a pipeline .* exchanges"),
        (lambda m, x: x * torch.bincount(x.argmax(-1).flatten(), minlength=WIDTH)[0], "histc"),
    ],
)
def test_errors(operation, words):
    with pytest.raises(ShardingError, match=words):
        staged(operation, Mesh(data=2, stage=2), lambda m, x: x)
