"""microbatches=: the numbers of a loop over parts of the batch; one reduction; less memory."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardingError

COUNT, BATCH, WIDTH, CLASSES = 3, 12, 8, 6
MESHES = {"data": "data=2", "model": "data=2,model=2", "wide": "data=4"}
MARKS = {"data": "_ _", "model": "model _", "wide": "data _"}


class Layers(nn.Module):
    """Two products with one of the parts between them that a loop's body may have."""

    def __init__(self, part):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.part = part
        if part == "norm":
            self.norm = nn.BatchNorm1d(4 * WIDTH)
        if part == "stack":
            self.layers = gspmd.stack(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        if part == "tied":
            self.down.weight = nn.Parameter(self.up.weight.T.contiguous())
            self.head.weight = nn.Parameter(torch.randn(CLASSES, WIDTH))
        if part == "count":
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("mean", torch.zeros(WIDTH))

    def feed(self, x):
        y = self.up(x)
        if self.part == "norm":
            y = self.norm(y)
        return x + self.down(torch.tanh(y))

    def forward(self, x, labels, scale=None):
        if self.part == "count":
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        x = (
            checkpoint(self.feed, x, use_reentrant=False)
            if self.part == "checkpoint"
            else self.feed(x)
        )
        if self.part == "stack":
            x = self.layers(x)
        if self.part == "tied":
            x = x @ self.head.weight.T @ self.head.weight
        x = x if scale is None else x * scale
        logits = self.head(x)
        loss = F.cross_entropy(logits, labels)
        if self.part == "results":
            return {"loss": loss, "logits": logits, "hits": (logits.argmax(-1) == labels).sum()}
        return loss


def by_parts(model, x, labels, **kwargs):
    """The mean loss, with the microbatches that every device has rows of."""
    total = []
    for i in range(COUNT):
        out = model(x[i::COUNT], labels[i::COUNT], **kwargs)
        total.append(out["loss"] if isinstance(out, dict) else out)
    return torch.stack(total).mean()


def batch():
    return torch.randn(BATCH, WIDTH, dtype=torch.double), torch.randint(CLASSES, (BATCH,))


PARTS = ("plain", "norm", "stack", "tied", "checkpoint", "results", "count")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("case", MESHES)
def test_numbers_gradients_and_buffers(part, case):
    torch.manual_seed(0)
    model, arguments = Layers(part).double(), batch()
    mesh = Mesh.parse(MESHES[case])
    gspmd.mark_sharding(model.up.weight, mesh, MARKS[case])
    truth = copy.deepcopy(model)
    expected = by_parts(truth, *arguments)
    expected.backward()
    plan = gspmd.plan(
        model, *arguments, mesh=mesh, in_specs=("data _", "data"), grad=True, microbatches=COUNT
    )
    out, gradients = plan.simulate(*arguments)
    loss = out["loss"] if part == "results" else out
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    for name, parameter in truth.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-10)
    for name, buffer in truth.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, rtol=1e-10, atol=1e-10)
    if part == "results":
        whole = truth(*arguments)
        torch.testing.assert_close(out["logits"], whole["logits"].detach(), rtol=1e-10, atol=1e-10)
        assert out["hits"] == whole["hits"]


def test_gradients_of_arguments():
    torch.manual_seed(0)
    model, (x, labels) = Layers("plain").double(), batch()
    x.requires_grad_()
    scale = torch.randn(WIDTH, dtype=torch.double, requires_grad=True)
    by_parts(model, x, labels, scale=scale).backward()
    plan = gspmd.plan(
        model, x, labels, scale=scale, mesh=Mesh(data=2), in_specs=("data _", "data"), grad=True,
        microbatches=COUNT,
    )  # fmt: skip
    _, gradients = plan.simulate(x, labels, scale=scale)
    for name, tensor in (("x", x), ("scale", scale)):
        torch.testing.assert_close(gradients[name], tensor.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", MESHES)
def test_gradients_are_reduced_once(case):
    """A weight that is stored in parts is gathered and scattered once, too."""
    torch.manual_seed(0)
    model, arguments, mesh = Layers("plain").double(), batch(), Mesh.parse(MESHES[case])
    gspmd.mark_sharding(model.up.weight, mesh, MARKS[case])
    once, divided = (
        gspmd.plan(
            model, *arguments, mesh=mesh, in_specs=("data _", "data"), grad=True, microbatches=n
        )
        for n in (1, COUNT)
    )
    of_values = COUNT * 64 * len(once.collectives)  # losses, and sums over model in each part
    weights = sum(c.sent_bytes for c in divided.collectives if "data" in c.axes)
    assert weights <= sum(c.sent_bytes for c in once.collectives if "data" in c.axes) + of_values


def test_one_microbatch_is_kept():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))

        def forward(self, x):
            return self.layers(x).square().mean()

    with torch.device("meta"):
        model, x = Deep(), torch.empty(1 << 16, 32)
    saved = [
        gspmd.plan(
            model, x, mesh=Mesh(data=2), in_specs="data _", grad=True, microbatches=n
        ).report("h100", tried=False).memory.peak
        for n in (1, 8)
    ]  # fmt: skip
    batch_bytes = 4 * x.numel() / 2
    # Eight layers keep their inputs, of the whole batch or of an eighth; a copy of the batch.
    assert saved[0] > 8 * batch_bytes and saved[1] < 4 * batch_bytes


def test_float32_sums_of_bfloat16_gradients():
    """Each of 256 equal gradients is below the rounding of their sum in bfloat16."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

        def forward(self, x):
            return (self.weight * x).sum()

    model, x = Scale(), torch.full((1024, 4), 1.0, dtype=torch.bfloat16)
    plan = gspmd.plan(model, x, mesh=Mesh(data=2), in_specs="data _", grad=True, microbatches=512)
    assert plan.simulate(x)[1]["weight"].tolist() == [2.0] * 4


def test_native_dropout_differs_between_microbatches():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x):
            return F.dropout(self.weight * x, 0.5).mean()

    for rng in ("global", "native"):
        plan = gspmd.plan(
            Dropped(), torch.ones(4, 64), mesh=Mesh(data=2), in_specs="data _", grad=True,
            microbatches=2, advanced={"rng": rng},
        )  # fmt: skip
        gradient = plan.simulate(torch.ones(4, 64))[1]["weight"] * 4 * 64 / 2
        assert len(gradient.unique()) > 3  # 0 to 4 of the rows are kept; 3 if parts draw alike


class Attention(nn.Module):
    """The loss is linear in the values."""

    def __init__(self):
        super().__init__()
        self.keys, self.values = (nn.Parameter(torch.randn(2, 16, 8).double()) for _ in range(2))

    def forward(self, x):  # [rows, heads, queries, width]
        keys, values = (w.expand(len(x), -1, -1, -1) for w in (self.keys, self.values))
        y = F.scaled_dot_product_attention(x, keys, values, dropout_p=0.5)
        return y.sum((1, 2, 3)).mean(), y


@pytest.mark.parametrize("case", MESHES)
def test_attention_dropout(case):
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(1, 2, 3, 8).double().expand(BATCH, -1, -1, -1)
    mesh = Mesh.parse(MESHES[case])
    plan = gspmd.plan(model, x, mesh=mesh, in_specs="data _ _ _", grad=True, microbatches=COUNT)
    assert any("loop_row" in node.name for node in plan.captured.graph.nodes)
    (loss, rows), gradients = plan.simulate(x)
    torch.testing.assert_close(loss, (gradients["values"] * model.values.detach()).sum())
    assert len(rows[:, 0, 0, 0].unique()) == BATCH


def test_rows_are_contiguous_where_the_batch_is():
    """Losses of other people's models call `labels.view(-1)`."""

    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(WIDTH, CLASSES).double()

        def forward(self, x, labels):
            return F.cross_entropy(self.head(x.view(-1, WIDTH)), labels.view(-1))

    torch.manual_seed(0)
    model = Viewed()
    x = torch.randn(BATCH, 3, WIDTH, dtype=torch.double)
    labels = torch.randint(CLASSES, (BATCH, 3))
    model(x, labels).backward()
    plan = gspmd.plan(
        model, x, labels, mesh=Mesh(data=2), in_specs=("data _ _", "data _"), grad=True,
        microbatches=COUNT,
    )  # fmt: skip
    gradient = plan.simulate(x, labels)[1]["head.weight"]
    torch.testing.assert_close(gradient, model.head.weight.grad, rtol=1e-10, atol=1e-10)


class Words(nn.Module):
    """An embedding, biases and float32 logits."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)
        self.up, self.head = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, 64)

    def forward(self, tokens, labels):
        logits = self.head(F.gelu(self.up(self.table(tokens)))).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
def test_gradients_of_words_are_reduced_once(precision):
    model, tokens = Words(), torch.zeros(BATCH, 64, dtype=torch.long)
    if precision == "bfloat16":
        model = model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        plan = gspmd.plan(
            model, tokens, tokens, mesh=Mesh(data=2), in_specs=("data _", "data _"), grad=True,
            microbatches=COUNT,
        )  # fmt: skip
    repeated = [c for c in plan.collectives if c.count > 1]
    assert all(c.payload_bytes <= 8 for c in repeated), repeated
    assert len(plan.collectives) - len(repeated) == 6  # the loss and five parameters


def test_evaluation_and_no_gradient_take_the_batch_at_once():
    model, (x, labels) = Layers("plain").double(), batch()
    arguments = {"mesh": Mesh(data=2), "in_specs": ("data _", "data"), "microbatches": COUNT}
    loops = []
    for training, grad in ((True, True), (True, False), (False, True)):
        plan = gspmd.plan(model.train(training), x, labels, grad=grad, **arguments)
        loops.append(any("loop_row" in node.name for node in plan.captured.graph.nodes))
    assert loops == [True, False, False]


class Table(Layers):
    """It returns sums by classes, which no row of the batch has."""

    def __init__(self):
        super().__init__("plain")

    def forward(self, x, labels):
        return super().forward(x, labels), torch.bincount(labels, minlength=CLASSES)


class Pair(nn.Module):
    def forward(self, x):
        return x * 2


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: gspmd.plan(Layers("plain"), torch.ones(10, WIDTH), torch.zeros(10).long(),
            mesh=Mesh(data=2), grad=True, microbatches=COUNT),
            "a batch of 10 is divided into 3 microbatches"),
        (lambda: gspmd.plan(Layers("plain").up, torch.ones(12, WIDTH), mesh=Mesh(data=2),
            grad=True, microbatches=COUNT), "returns no scalar with a gradient"),
        (lambda: gspmd.plan(Table(), torch.ones(12, WIDTH), torch.zeros(12).long(),
            mesh=Mesh(data=2), grad=True, microbatches=COUNT),
            "for a microbatch of 4 rows"),
        (lambda: gspmd.plan(Pair(), 1.0, mesh=Mesh(data=2), grad=True, microbatches=2),
            "a call without tensors"),
        (lambda: gspmd.plan(Pair(), torch.ones(2), mesh=Mesh(data=2), microbatches=0),
            "microbatches is 0"),
    ],
)  # fmt: skip
def test_errors(call, words):
    with pytest.raises(ShardingError, match=words):
        call()
