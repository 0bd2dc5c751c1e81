"""pipeline_model: models whose forward stays as it is, under all schedules."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardingError

WORDS, WIDTH, BATCH, LENGTH, LAYERS = 20, 8, 16, 5, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, scale, mask=None):
        y = self.down(torch.tanh(self.up(x))) * scale
        return x + (y if mask is None else y * mask[..., None])


class Model(nn.Module):
    """Tied words, an argument for all layers that is trained, and one with rows of the batch."""

    def __init__(self, outputs="loss"):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.Module()
        self.inner.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.tensor(0.5))
        self.outputs = outputs

    def forward(self, tokens, labels=None, mask=None):
        x = self.embed(tokens)
        for layer in self.inner.layers:
            x = layer(x, self.scale, mask=mask)
        logits = self.norm(x) @ self.embed.weight.T
        if labels is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss if self.outputs == "loss" else {"logits": logits, "loss": loss, "name": "m"}


def batch():
    tokens, labels = torch.randint(WORDS, (2, BATCH, LENGTH))
    return tokens, labels, (torch.rand(BATCH, LENGTH) > 0.3).double()


def staged(model, mesh, **options):
    options = {"microbatches": 4, "schedule": "1f1b", "rows": ("mask",), **options}
    return gspmd.pipeline_model(copy.deepcopy(model), "inner.layers", mesh, **options)


def check(gradients, model, pipelined):
    """Compare gradients by the names of the stacked weights, and each layer's row."""
    layers, places = model.inner.layers, pipelined.inner.layers.places
    for name, parameter in model.named_parameters():
        if not name.startswith(("inner.layers.", "decoder.")):
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)
    for name, _ in layers[0].named_parameters():
        rows = gradients[f"inner.layers.block.{name}"][list(places)]
        expected = torch.stack([layer.get_parameter(name).grad for layer in layers])
        torch.testing.assert_close(rows, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("outputs", ["loss", "dict"])
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b"},
        {"schedule": "zero_bubble"},
        {"schedule": "gpipe"},
        {"schedule": "auto", "recompute": True},
        {"schedule": "1f1b", "repeats": 2},
        {"schedule": "zero_bubble", "repeats": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("mesh", ["stage=2", "data=2,stage=2,model=2"])
def test_a_training_step(mesh, options, outputs):
    torch.manual_seed(0)
    model, mesh = Model(outputs).double(), Mesh.parse(mesh)
    tokens, labels, mask = batch()
    expected = model(tokens, labels, mask)
    loss = expected if outputs == "loss" else expected["loss"]
    loss.backward()
    pipelined = staged(model, mesh, **options)
    gspmd.annotate(
        pipelined, mesh, {"inner.layers.*.up.weight": "model _"} if mesh.size > 2 else {}
    )
    rows = "data _" if mesh.size > 2 else None
    plan = gspmd.plan(pipelined, tokens, labels, mask, mesh=mesh, in_specs=(rows,) * 3, grad=True)
    found, gradients = plan.simulate(tokens, labels, mask)
    if outputs == "dict":
        assert found["logits"] is None and found["name"] == "m"
        found = found["loss"]
    torch.testing.assert_close(found, loss.detach(), rtol=1e-10, atol=1e-12)
    check(gradients, model, pipelined)


def test_several_microbatches_of_the_pipeline():
    """The option microbatches around it: a pipeline for each half of the batch."""
    torch.manual_seed(0)
    model, mesh = Model().double(), Mesh(stage=2)
    arguments = batch()
    model(*arguments).backward()
    pipelined = staged(model, mesh, microbatches=2)
    plan = gspmd.plan(pipelined, *arguments, mesh=mesh, grad=True, microbatches=2)
    check(plan.simulate(*arguments)[1], model, pipelined)


def test_forward_alone_is_that_of_the_model():
    """Without a mesh, without gradients and in eval mode; parameters keep their names."""
    torch.manual_seed(0)
    model, mesh = Model("dict").double(), Mesh(stage=2)
    pipelined, arguments = staged(model, mesh), batch()
    expected = model(*arguments)["logits"].detach()
    torch.testing.assert_close(pipelined(*arguments)["logits"], expected)
    with torch.no_grad():
        found = gspmd.plan(pipelined, *arguments, mesh=mesh).simulate(*arguments)
    torch.testing.assert_close(found["logits"], expected)
    pipelined.eval()
    found, _ = gspmd.plan(pipelined, *arguments, mesh=mesh, grad=True).simulate(*arguments)
    torch.testing.assert_close(found["logits"], expected)
    assert isinstance(pipelined, Model) and type(copy.deepcopy(pipelined)) is type(pipelined)
    assert pipelined.state_dict().keys() == model.state_dict().keys()


class Skip(Model):
    """The embedding is read behind the layers, too."""

    def forward(self, tokens, labels):
        x = entered = self.embed(tokens)
        for layer in self.inner.layers:
            x = layer(x, self.scale)
        logits = self.norm(x + entered) @ self.embed.weight.T
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_values_before_the_layers_are_read_behind_them(schedule):
    torch.manual_seed(0)
    model, mesh, arguments = Skip().double(), Mesh(data=2, stage=2), batch()[:2]
    model(*arguments).backward()
    pipelined = staged(model, mesh, schedule=schedule)
    plan = gspmd.plan(pipelined, *arguments, mesh=mesh, in_specs=("data _",) * 2, grad=True)
    check(plan.simulate(*arguments)[1], model, pipelined)


class Translation(Model):
    """Behind the layers, targets attend to one another, and to the layers' result."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def attend(self, x, y, **options):
        q, k, v = (t[:, None] for t in (self.query(x), self.key(y), y))
        return x + F.scaled_dot_product_attention(q, k, v, **options)[:, 0]

    def forward(self, tokens, labels):
        y = self.embed(labels.roll(1, 1))
        y = self.attend(y, y, is_causal=True)
        x = self.embed(tokens)
        for layer in self.inner.layers:
            x = layer(x, self.scale)
        logits = self.norm(self.attend(y, x)) @ self.embed.weight.T
        return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1))


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "gpipe"])
def test_targets_attend_behind_the_layers(schedule):
    """Gradients of what follows from targets alone are no sums over the stages."""
    torch.manual_seed(0)
    model, mesh, arguments = Translation().double(), Mesh(data=2, stage=2), batch()[:2]
    model(*arguments).backward()
    pipelined = staged(model, mesh, schedule=schedule)
    plan = gspmd.plan(pipelined, *arguments, mesh=mesh, in_specs=("data _",) * 2, grad=True)
    check(plan.simulate(*arguments)[1], model, pipelined)


class Decoder(nn.Module):
    """Attends to the encoder's result, in the layers or behind them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, memory, mask=None):
        mask = None if mask is None else mask[:, None, :].bool()
        x = x + F.scaled_dot_product_attention(x, memory, memory, mask)
        return x + self.down(torch.tanh(self.up(x)))


class TwoLists(Model):
    """An encoder, a decoder of another length, words at positions, and a copy head behind both."""

    def __init__(self, copies, decoders=3):
        super().__init__()
        self.positions, self.copies = nn.Embedding(LENGTH, WIDTH), copies
        self.decoder = nn.ModuleList(Decoder() for _ in range(decoders))

    def forward(self, tokens, labels, mask):
        x = self.embed(tokens)
        for layer in self.inner.layers:
            x = layer(x, self.scale, mask=mask)
        memory = self.norm(x)
        labels = labels[:, : LENGTH - 1]
        y = self.embed(labels.roll(1, 1)) + self.positions(torch.arange(LENGTH - 1))
        for layer in self.decoder:
            y = layer(y, memory, mask=mask)
        logits = y @ self.embed.weight.T
        if self.copies:
            logits = logits + (memory.mean(1, keepdim=True) @ self.embed.weight.T)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    "mesh, options, copies",
    [
        ("stage=2", {"schedule": "1f1b"}, True),
        ("data=2,stage=2", {"schedule": "zero_bubble"}, False),
        ("stage=2", {"schedule": "1f1b", "recompute": True, "repeats": 2}, True),
    ],
)
def test_two_lists_of_layers(mesh, options, copies):
    """The first list's result passes the second one's stages, and may be read behind them."""
    torch.manual_seed(0)
    model, mesh, arguments = TwoLists(copies).double(), Mesh.parse(mesh), batch()
    loss = model(*arguments)
    loss.backward()
    pipelined = gspmd.pipeline_model(
        copy.deepcopy(model),
        ("inner.layers", "decoder"),
        mesh,
        microbatches=4,
        rows=("mask", "memory"),
        **options,
    )
    assert pipelined.state_dict().keys() == model.state_dict().keys()
    specs = ("data _",) * 3 if "data" in mesh.names else None
    plan = gspmd.plan(pipelined, *arguments, mesh=mesh, in_specs=specs, grad=True)
    found, gradients = plan.simulate(*arguments)
    torch.testing.assert_close(found, loss.detach(), rtol=1e-10, atol=1e-12)
    check(gradients, model, pipelined)
    layers = pipelined.decoder
    for number, layer in enumerate(model.decoder):
        row = gradients["decoder.block.up.weight"][layers.place(number)]
        torch.testing.assert_close(row, layer.up.weight.grad, rtol=1e-9, atol=1e-12)


class Logits(Model):
    """A head with a bias whose logits are float32, as transformers computes its losses."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for layer in self.inner.layers:
            x = layer(x, self.scale)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_autocast():
    torch.manual_seed(0)
    model, mesh, arguments = Logits(), Mesh(data=2, stage=2), batch()[:2]
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(*arguments)
        expected.backward()
        pipelined = staged(model, mesh)
        plan = gspmd.plan(pipelined, *arguments, mesh=mesh, in_specs=("data _",) * 2, grad=True)
    loss, gradients = plan.simulate(*arguments)
    # A rounding of each product on the way; of gradients relative to the largest.
    eps = 2 * LAYERS * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(loss, expected.detach(), rtol=eps, atol=0)
    for name, head in model.head.named_parameters(prefix="head"):
        atol = eps * head.grad.abs().max()
        torch.testing.assert_close(gradients[name], head.grad, rtol=0, atol=atol)


def test_weights_in_parts_are_gathered_once_a_step():
    """ZeRO in the stages: bytes of a gather and of a scatter, for any number of microbatches."""
    torch.manual_seed(0)
    model, mesh, arguments = Model().double(), Mesh(data=2, stage=2), batch()[:2]
    model(*arguments).backward()
    weights = sum(x.numel() * x.itemsize for x in model.inner.layers.parameters() if x.dim() == 2)
    for microbatches, mark in ((2, "data _"), (8, "data _"), (8, "_ data"), (8, "data:p1 _")):
        pipelined = staged(model, mesh, microbatches=microbatches)
        names = ("up.weight", "down.weight")
        gspmd.annotate(pipelined, mesh, {f"inner.layers.*.{n}": mark for n in names})
        plan = gspmd.plan(pipelined, *arguments, mesh=mesh, in_specs=("data _",) * 2, grad=True)
        check(plan.simulate(*arguments)[1], model, pipelined)
        for kind in ("all_gather", "reduce_scatter"):
            sent = [c for c in plan.collectives if c.kind == kind and c.axes == ("data",)]
            # A stage's weights, the other shard of them. Vectors of the loss are below 5 %.
            found = sum(c.sent_bytes for c in sent)
            assert weights / 4 <= found <= 1.05 * weights / 4


class Branch(Model):
    def forward(self, tokens, labels):
        return self.embed(tokens).square().mean()


class Twice(Model):
    def __init__(self, mesh):
        super().__init__()
        self.others = gspmd.pipeline([Block() for _ in range(2)], mesh, microbatches=2)


class Silent(Model):
    def forward(self, tokens, labels):
        return super().forward(tokens)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda mesh: gspmd.pipeline_model(Model(), "layers", mesh, microbatches=2),
            "no list of layers 'layers'"),
        (lambda mesh: staged(staged(Model(), mesh), mesh), "no list of layers"),
        (lambda mesh: gspmd.pipeline_model(Twice(mesh), "inner.layers", mesh, microbatches=2),
            "has two pipelines"),
        (lambda mesh: gspmd.plan(staged(Branch(), mesh), *batch()[:2], mesh=mesh, grad=True),
            "forward does not call the layers"),
        (lambda mesh: gspmd.plan(staged(Silent(), mesh), *batch()[:2], mesh=mesh, grad=True),
            "the model returns no scalar"),
        (lambda mesh: gspmd.plan(staged(Model(), mesh, rows=None), *batch()[:2],
            mask=batch()[2].float(), mesh=mesh, grad=True), "'mask' of a pipeline has 16 rows"),
    ],
)  # fmt: skip
def test_errors(call, words):
    with pytest.raises(ShardingError, match=words):
        call(Mesh(stage=2))
