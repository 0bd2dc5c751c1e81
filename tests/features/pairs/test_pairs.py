"""Losses over all pairs of a batch's rows: right, and no device has a value for each pair."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, eager
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import Mesh
from torchgspmd.fx_passes.pass_types import FEATURE_PASSES, FeaturePass

DOUBLE = torch.float64
BLOCKS = {"costs": {"pair_bytes": 0}}  # blocks, however few pairs there are

Loss = Callable[["Towers", Tensor, Tensor], Tensor]


class Towers(nn.Module):
    """Two projections, and a loss of all pairs of their rows."""

    def __init__(self, loss: Loss, width: int = 2, dtype: torch.dtype = DOUBLE) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss = loss
        self.left = nn.Parameter(torch.randn(2 * width, width, dtype=dtype))
        self.right = nn.Parameter(torch.randn(3 * width, width, dtype=dtype))
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=dtype))
        self.bias = nn.Parameter(torch.tensor(-2.0, dtype=dtype))

    def forward(self, x: Tensor, y: Tensor, *others: Tensor) -> Tensor:
        return self.loss(self, F.normalize(x @ self.left), y @ self.right, *others)


def sigmoid(m: Towers, a: Tensor, b: Tensor) -> Tensor:
    """SigLIP's loss (arXiv 2303.15343)."""
    logits = a @ b.T * m.scale.exp() + m.bias
    labels = 2 * torch.eye(len(a), len(b), dtype=a.dtype) - 1
    return -F.logsigmoid(labels * logits).sum() / len(a)


def clip(m: Towers, a: Tensor, b: Tensor) -> Tensor:
    logits = a @ b.T * m.scale.exp()
    labels = torch.arange(len(a))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def log_sum(m: Towers, a: Tensor, b: Tensor) -> Tensor:
    logits = a @ b.T * m.scale
    return logits.logsumexp(1).mean() + logits.logsumexp(0).mean()


def hinge(m: Towers, a: Tensor, b: Tensor) -> Tensor:
    scores = a @ b.T
    others = ~torch.eye(len(a), dtype=torch.bool)
    return ((0.2 + scores - scores.diagonal()[:, None]).clamp(min=0) * others).sum() / len(a)


def kernel(m: Towers, a: Tensor, b: Tensor) -> Tensor:
    """A kernel of distances, as in maximum mean discrepancy and in t-SNE."""
    squares = a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T
    return (-m.scale * squares).exp().mean() + (1 / (1 + squares)).sum(0).log().mean()


def farthest(m: Towers, a: Tensor, b: Tensor) -> Tensor:
    scores = torch.einsum("nk,mk->mn", a, b)
    return scores.amax(0).mean() + m.scale * scores.amin(1).sum()


def masked(m: Towers, a: Tensor, b: Tensor) -> Tensor:
    """Rows attend to earlier ones, without a softmax: the values are rows of b, too."""
    return ((a @ b.T).tril(1) * m.scale @ (b + m.bias)).square().mean()


def classes(m: Towers, a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Pairs of one class are alike (supervised contrastive learning, arXiv 2004.11362)."""
    alike = x[:, None] == y[None, :]
    log_p = F.log_softmax(a @ b.T / 0.5, 1)
    return -(torch.where(alike, log_p, 0).sum(1) / alike.sum(1).clamp(min=1)).mean()


def ranked(m: Towers, a: Tensor, b: Tensor) -> Tensor:
    """Each row's score is to be above the other tower's: differences, without a product."""
    return F.softplus(b.sum(1) - m.scale * a.sum(1)[:, None]).mean()


def spread(m: Towers, a: Tensor, b: Tensor) -> Tensor:
    """A kernel as it stands in the formula: differences of rows, squared and added up."""
    distances = (a[:, None] - b[None]).square().sum(-1)
    return (-m.scale * distances).exp().mean() + torch.cdist(a, b, p=1).mean()


def nearest(m: Towers, a: Tensor, b: Tensor) -> Tensor:
    """The nearest other row; in the backward its gradient alone is a value for pairs."""
    scores = a @ b.T - 9 * torch.eye(len(a), dtype=a.dtype)
    return (2 - scores.max(1).values.tanh()).log().mean()


SQUARE = {"sigmoid": sigmoid, "clip": clip, "hinge": hinge, "nearest": nearest}
LOSSES = {**SQUARE, "log_sum": log_sum, "kernel": kernel, "farthest": farthest, "masked": masked}
LOSSES |= {"ranked": ranked, "spread": spread}
MESHES = {
    "data": (Mesh(data=4), "data _"),
    "odd": (Mesh(data=3), "data _"),
    "two": (Mesh(data=2), "data _"),
    "both": (Mesh(data=2, fsdp=2), "data+fsdp _"),
    "grid": (Mesh(data=2, model=2), "data _"),
}


def inputs(rows: int, columns: int, width: int = 2, dtype: torch.dtype = DOUBLE) -> list[Tensor]:
    torch.manual_seed(1)
    sizes = (rows, 2 * width), (columns, 3 * width)
    return [torch.randn(size, dtype=dtype) for size in sizes]


def planned(model: nn.Module, args: list[Tensor], mesh: Mesh, spec: str, **advanced) -> gspmd.Plan:
    specs = [spec if x.dim() == 2 else spec.split()[0] for x in args]
    return gspmd.plan(model, *args, mesh=mesh, in_specs=(*specs,), grad=True, advanced=advanced)


def kinds(plan: gspmd.Plan) -> set[str]:
    """Return the kinds of collectives that carry more than numbers."""
    return {c.kind for c in plan.collectives if c.sent_bytes > 64}


def check(loss: str, mesh: str, rows: int, columns: int) -> None:
    model, args = Towers(LOSSES[loss]), inputs(rows, columns)
    if mesh == "grid":
        gspmd.annotate(model, MESHES[mesh][0], {"left": "_ model", "right": "_ model"})
    plan = planned(model, args, *MESHES[mesh], **BLOCKS)
    assert_same(plan.simulate(*args, _poison=True), eager(model, *args), terms=2048)
    text = plan.text(full=True)
    assert "loop_next" in text and f"{rows}, {columns}]" not in text.replace("@data", "")


# Every loss on an even and an uneven batch, every mesh several times.
CASES = [
    (loss, [*MESHES][(3 * i + j) % len(MESHES)], rows, rows if loss in SQUARE else columns)
    for i, loss in enumerate(LOSSES)
    for j, (rows, columns) in enumerate(((24, 36), (23, 29), (31, 20)))
]


@pytest.mark.parametrize("loss, mesh, rows, columns", CASES)
def test_losses_of_pairs_are_those_of_one_device(loss: str, mesh: str, rows: int, columns: int):
    check(loss, mesh, rows, columns)


def test_labels_of_columns_travel_with_them():
    torch.manual_seed(2)
    model, args = Towers(classes), inputs(22, 31)
    args += [torch.randint(0, 4, (22,)), torch.randint(0, 4, (31,))]
    plan = planned(model, args, *MESHES["data"], **BLOCKS)
    assert_same(plan.simulate(*args, _poison=True), eager(model, *args), terms=2048)
    assert "loop_next" in plan.text(full=True)


@pytest.mark.parametrize("loss", ["sigmoid", "clip", "hinge"])
def test_bytes_are_those_of_the_gather_and_memory_is_a_blocks(loss: str):
    rows, devices = 2048, 8
    with torch.device("meta"):
        model, args = Towers(LOSSES[loss], 16, torch.float32), inputs(rows, rows, 16, torch.float32)
    found = [
        planned(model, args, Mesh(data=devices), "data _", skip_passes=skipped)
        for skipped in (("ring_pairs",), ())
    ]
    gathered, ring = found
    assert ring.sent_bytes <= gathered.sent_bytes
    assert "all_gather" in kinds(gathered)
    assert kinds(ring) <= {"permute", "all_reduce"}
    block = (rows // devices) ** 2 * 4
    peaks = [plan.report("h100", tried=False).memory.peak for plan in found]
    # Before, a device has several values for n / 8 x n pairs; now some blocks, and the operands.
    assert peaks[0] > 3 * devices * block
    assert peaks[1] < 10 * block + 8 * rows * 16 * 4


@pytest.mark.parametrize("loss", [sigmoid, nearest, ranked, spread])
def test_the_memory_grows_with_the_rows_of_a_device_alone(loss: Loss):
    peaks = []
    for devices in (4, 8, 16):
        with torch.device("meta"):
            rows = 512 * devices
            model, args = Towers(loss, 8, torch.float32), inputs(rows, rows, 8, torch.float32)
        plan = planned(model, args, Mesh(data=devices), "data _")
        peaks.append(plan.report("h100", tried=False).memory.peak)
    assert peaks[2] < 1.2 * peaks[0]


def test_few_pairs_are_gathered():
    model, args = Towers(sigmoid), inputs(64, 64)
    assert "loop_next" not in planned(model, args, Mesh(data=4), "data _").text(full=True)


class Layers(nn.Module):
    """Layers whose weights lie along the batch's axis."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 64, dtype=DOUBLE)
        self.down = nn.Linear(64, 8, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


def test_weights_are_no_rows_of_a_batch(monkeypatch: pytest.MonkeyPatch):
    def refuse(program: object) -> None:
        raise AssertionError("it has no pairs of rows")

    monkeypatch.setitem(FEATURE_PASSES, "ring_pairs", FeaturePass(refuse, ()))
    model = Layers()
    gspmd.annotate(model, Mesh(data=4), {"*.weight": "data _"})
    gspmd.plan(model, torch.randn(64, 8, dtype=DOUBLE), mesh=Mesh(data=4), grad=True,
               in_specs=("data _",), advanced=BLOCKS)  # fmt: skip


def test_products_of_a_batch_are_no_pairs(monkeypatch: pytest.MonkeyPatch):
    """All of a batch's rows have the same index in both operands."""

    def refuse(program: object) -> None:
        raise AssertionError("it has no pairs of rows")

    monkeypatch.setitem(FEATURE_PASSES, "ring_pairs", FeaturePass(refuse, ()))
    model, args = Towers(lambda m, a, b: (a @ b.mT).tanh().sum()), inputs(24, 24)
    args = [x.unflatten(0, (4, 6)) for x in args]
    plan = gspmd.plan(model, *args, mesh=Mesh(data=4), in_specs=("data _ _",) * 2, grad=True,
                      advanced=BLOCKS)  # fmt: skip
    assert_same(plan.simulate(*args, _poison=True), eager(model, *args), terms=2048)


class Read(Towers):
    """A loss whose values of pairs are also a result."""

    def forward(self, x: Tensor, y: Tensor, *others: Tensor) -> Tensor:
        return ((x @ self.left) @ (y @ self.right).T).sigmoid()


def test_values_that_leave_the_program_stay_whole():
    model, args = Read(sigmoid), inputs(24, 24)
    plan = planned(model, args, *MESHES["data"], **BLOCKS)
    assert_same(plan.simulate(*args, _poison=True), eager(model, *args), terms=2048)
    assert "loop_next" not in plan.text(full=True)


def test_sums_of_half_precision_keep_their_digits():
    model, args = Towers(sigmoid, dtype=torch.bfloat16), inputs(64, 64, 2, torch.bfloat16)
    plan = planned(model, args, *MESHES["data"], **BLOCKS)
    assert_same(plan.simulate(*args), eager(model, *args), terms=8)


def test_random_losses():
    choose = random.Random(0)
    for _ in range(3):
        terms = choose.sample([log_sum, kernel, farthest, masked], 2)
        model = Towers(lambda m, a, b, t=terms: sum(each(m, a, b) for each in t))
        args = inputs(choose.randint(17, 40), choose.randint(17, 40))
        plan = planned(model, args, *MESHES[choose.choice([*MESHES])], **BLOCKS)
        assert_same(plan.simulate(*args, _poison=True), eager(model, *args), terms=4096)
