"""pipeline(loss=...): backwards between forwards. Numbers, what is sent and kept, the schedules."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from pipelined import EXACT, check, with_pipeline
from torch import nn

import torchgspmd as gspmd
from torchgspmd.features.pipelines.list_scheduler import Order, order_within
from torchgspmd.fx_passes.loop_call import loop_calls
from torchgspmd.tools.report.estimate import EXPOSED


class Block(nn.Module):
    def __init__(self, width=4, dropout=0.0):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 6), nn.Linear(6, width)

    def forward(self, x, scale=None):
        y = self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        return x + (y if scale is None else y * scale)


class Model(nn.Module):
    """Embedding and head are tied; the head is in the loss of the pipeline."""

    def __init__(self, blocks):
        super().__init__()
        self.embed = nn.Parameter(torch.randn(5, 4))
        self.blocks = blocks

    def loss(self, y, tokens):
        return F.cross_entropy((y @ self.embed.T).flatten(0, 1), tokens.flatten())

    def forward(self, tokens, scale=None):
        x = self.embed[tokens]
        if not isinstance(self.blocks, nn.ModuleList):
            return self.blocks(x, scale, tokens=tokens)
        for block in self.blocks:
            x = block(x, scale)
        return self.loss(x, tokens)


def pair(count, mesh, dropout=0.0, **options):
    """The model with a loop, and with a pipeline of the same weights."""
    torch.manual_seed(0)
    alone = Model(nn.ModuleList(Block(4, dropout) for _ in range(count))).double()
    model = with_pipeline(alone, mesh, **options)
    return alone, model


def call_of(plan):
    ((_, call),) = loop_calls(plan.program.graph)
    return call


@pytest.mark.parametrize(
    "count, mesh, options",
    (
        (4, "stage=4", {"microbatches": 8, "schedule": "1f1b"}),
        (7, "stage=4", {"microbatches": 8, "schedule": "zero_bubble", "repeats": 2}),  # ZBV
        (4, "stage=2", {"microbatches": 4, "schedule": "1f1b", "repeats": 2}),  # interleaved
        (5, "stage=2", {"microbatches": 4, "schedule": "dualpipev"}),
        (8, "stage=4", {"microbatches": 16, "schedule": "dualpipev", "recompute": True}),
        (4, "data=2,stage=2", {"microbatches": 8, "schedule": "dualpipev", "rows": ("scale",)}),
        (3, "stage=2", {"microbatches": 4, "schedule": "gpipe"}),  # 2 blocks and 1
        (4, "stage=2,model=2", {"microbatches": 4, "schedule": "auto", "recompute": True}),
        (4, "data=2,stage=2", {"microbatches": 4, "schedule": "zero_bubble", "rows": ("scale",)}),
    ),
)
def test_loss_and_gradients(count, mesh, options):
    mesh = gspmd.Mesh.parse(mesh)
    alone, model = pair(count, mesh, **options)
    shape = (16, 1, 4) if "rows" in options else (4,)
    tokens, scale = torch.randint(5, (16, 3)), torch.rand(shape, dtype=torch.float64)
    check(alone, model, mesh, tokens, scale)


def test_dropout_is_that_of_the_forward():
    """With one seed a run repeats, with and without recomputation: masks are drawn once."""
    mesh, results = gspmd.Mesh(stage=2), []
    for recompute in (False, True):
        _, model = pair(2, mesh, 0.5, microbatches=4, schedule="1f1b", recompute=recompute)
        tokens = torch.arange(24).view(8, 3) % 5
        plan = gspmd.plan(model, tokens, mesh=mesh, grad=True)
        torch.manual_seed(1)
        results.append(plan.simulate(tokens))
    (loss, gradients), (other_loss, others) = results
    torch.testing.assert_close(loss, other_loss, **EXACT)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], **EXACT)


class Regression(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x):
        return self.blocks(x, target=x)


def planned(microbatches, p=4, blocks=4, **options):
    """The plan of a pipeline whose microbatches are 2 rows of 64 numbers, in float32."""
    mesh = gspmd.Mesh(stage=p)
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(blocks)]
        x = torch.empty(2 * microbatches, 64)
    options |= {"microbatches": microbatches, "loss": F.mse_loss}
    model = Regression(gspmd.pipeline(layers, mesh, **options))
    return gspmd.plan(model, x, mesh=mesh, grad=True)


ROW = 2 * 64 * 4  # bytes of a microbatch


def test_one_activation_a_microbatch_and_boundary():
    plan = planned(8, schedule="1f1b")
    permutes = [c for c in plan.collectives if c.kind == "permute"]
    assert [(c.count, c.payload_bytes) for c in permutes] == [(8, ROW), (8, ROW)]
    # besides, the loss and the gradient of x
    assert plan.sent_bytes <= 2 * 8 * ROW + 2 * (4 + 8 * ROW) * 3 / 4
    assert not [c for c in plan.collectives if c.payload_bytes > 8 * ROW]


def test_bubbles_and_activations_of_the_program():
    p, m = 4, 8
    for name, kept, share in (
        ("gpipe", m, (p - 1) / (m + p - 1)),
        ("1f1b", p, (p - 1) / (m + p - 1)),
        ("zero_bubble", p, (p - 1) / (3 * m + p - 1)),
    ):
        plan = planned(m, schedule=name)
        call = call_of(plan)
        assert call.most_kept == kept and call.order.schedule.idle == pytest.approx(share)
        assert {body.__name__ for body in call.bodies} == {"forward", "loss", "backward"} | (
            {"weights"} if name == "zero_bubble" else set()
        )
        assert call.kept_bytes == 2 * ROW  # what the block takes, and its result
        assert f"{share:.0%} of the time idle, activations of {kept} x 1.00 KiB" in plan.summary()
    assert "1 to 7: 67%, 43%, 25%, 11%, 8%, 4%, 0% idle" in plan.summary()


def test_memory_and_program_do_not_grow_with_microbatches():
    few, many = planned(8, schedule="1f1b"), planned(32, schedule="1f1b")
    growth = 24 * ROW  # of the batch; its gradient is no part of the program's results here
    assert many.memory.peak - many.memory.inputs - (few.memory.peak - few.memory.inputs) <= growth
    assert planned(32, schedule="gpipe").memory.peak >= many.memory.peak + 28 * 2 * ROW
    for one, other in zip(call_of(few).bodies, call_of(many).bodies):
        assert len(one.graph.nodes) == len(other.graph.nodes)
    assert len(few.sharded.nodes) == len(many.sharded.nodes)


def test_the_program_does_not_grow_with_layers():
    """Gradients of weights have a loop of their own, and the forward keeps nothing of its layers
    if they are computed again.
    """
    plans = [planned(4, 2, n, schedule="zero_bubble", recompute=True) for n in (4, 8)]
    few, many = (plan.sharded.nodes for plan in plans)
    assert len(few) == len(many)
    forward, _, backward, weights = (dict(loop_calls(b.graph)) for b in call_of(plans[1]).bodies)
    assert [len(each) for each in (forward, backward, weights)] == [1, 2, 1]
    ((_, first),) = forward.items()
    assert (first.carries, first.stacks, first.loop.length) == (1, 0, 4)


def within(text, memory):
    """The order of a text within a memory, if a microbatch takes 1024 bytes."""
    return order_within(replace(Order.parse(text), memory=memory), 1024, True)


def test_memory_chooses_the_schedule():
    call = call_of(planned(8, memory=7 * 2 * ROW, recompute=True))
    assert call.kept_bytes == 2 * ROW  # of a gradient of weights: what it multiplies
    assert call.order.limit == call.most_kept == 7
    for kept in (1, 2, 4, 7):
        order = within("auto 4x8", kept * 1024 + 1023)
        assert (order.name, order.limit) == ("zero_bubble", kept)
        assert max(order.schedule.kept) == kept
    assert within("auto 4x8", 1 << 20).limit == 7  # no more are of use
    assert within("1f1b 4x8", 2 * 1024).limit == 2 and within("1f1b 4x8", 1 << 20).limit == 4
    assert within("auto 4x8 rounds 2 vee", 9 * 1024).limit == 8
    with pytest.raises(gspmd.ShardingError, match="memory=1023 .*takes 1024(\n.*)*recompute"):
        within("auto 4x8", 1023)
    with pytest.raises(gspmd.ShardingError, match="memory=1024 .*in each of 2 rounds"):
        within("auto 4x8 rounds 2 vee", 1024)
    with pytest.raises(gspmd.ShardingError, match="memory=2048 (.*\n)*.*1f1b"):
        within("gpipe 4x8", 2048)
    with pytest.raises(gspmd.ShardingError, match="without a loss is given memory=1"):
        gspmd.pipeline([Block(), Block()], gspmd.Mesh(stage=2), microbatches=2, memory=1)


def test_a_plan_without_gradients_has_forwards_alone():
    mesh = gspmd.Mesh(stage=2)
    alone, model = pair(2, mesh, microbatches=4, schedule="1f1b")
    tokens = torch.randint(5, (8, 3))
    with torch.no_grad():
        plan = gspmd.plan(model, tokens, mesh=mesh)
        torch.testing.assert_close(plan.simulate(tokens), alone(tokens), **EXACT)
    assert [body.__name__ for body in call_of(plan).bodies] == ["forward", "loss"]


class Outputs(nn.Module):
    """What the blocks return, to evaluate a model that is trained with a loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model.blocks.outputs(self.model.embed[tokens])


def test_forwards_alone_in_two_rounds():
    mesh = gspmd.Mesh(stage=2)
    alone, model = pair(3, mesh, microbatches=4, repeats=2)
    tokens = torch.randint(5, (8, 3))
    with torch.no_grad():
        plan = gspmd.plan(model, tokens, mesh=mesh)
        torch.testing.assert_close(plan.simulate(tokens), alone(tokens), **EXACT)
        outputs = gspmd.plan(Outputs(model), tokens, mesh=mesh).simulate(tokens)
        expected = alone.embed[tokens]
        for block in alone.blocks:
            expected = block(expected)
        torch.testing.assert_close(outputs, expected, **EXACT)
    assert [body.__name__ for body in call_of(plan).bodies] == ["forward", "forward 1", "loss 1"]


def test_an_estimate_has_the_time_that_stages_wait():
    """Two rounds of half the blocks: the same work, and less of the step is idle."""
    one, two = (planned(8, blocks=8, schedule="1f1b", repeats=n) for n in (1, 2))
    waits = []
    for plan in (one, two):
        estimate = plan.report(hardware="h100").estimate
        waits.append(estimate.busy(EXPOSED) / estimate.seconds)
    assert 0.1 < waits[1] < 0.75 * waits[0]


class Recorder:
    """A transport of the first device that notes what happens, and when."""

    device = 0

    def __init__(self):
        self.events = []

    def send(self, messages):
        self.events += [f"send {message.link.kind}" for message in messages]

    def receive(self, messages):
        self.events += ["begin"] * len(messages)

        def arrived():
            self.events += ["wait"] * len(messages)
            return [message.value for message in messages]

        return arrived

    def finish(self):
        self.events.append("finish")


def test_a_stage_receives_while_it_computes():
    """What a piece takes is on its way before the piece ahead of it computes."""
    call = call_of(planned(8, schedule="1f1b"))
    call.transport = recorder = Recorder()

    def computes(body):
        metas = [n.meta for n in body.graph.output_node().args[0]]

        def run(*inputs):
            recorder.events.append(body.kind)
            return [torch.zeros(meta["shape"], dtype=meta["dtype"]) for meta in metas]

        return run

    for body in call.pieces:
        body.run = computes(body)
    call([torch.zeros(1)] * len(call.carries), [torch.zeros(8, 1)] * len(call.rows), call.others)
    begin, computed, done = [], [], 0
    for event in recorder.events:
        begin += [done] * (event == "begin")
        computed += [done] * (event == "wait")
        done += event in ("forward", "backward")
    assert done == 16 and len(begin) == 8
    assert all(late - early == 1 for early, late in zip(begin, computed, strict=True))


class Layered(nn.Module):
    """Layers of several products, with dropout."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = dropout

    def forward(self, x):
        return x + F.dropout(self.down(self.up(x).tanh()), self.dropout)


def stored_in_parts(mesh, count, width, meta=False, **options):
    """A pipeline whose weights lie along the batch's axis, and its batch."""
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        layers = [Layered(width) for _ in range(count)]
        layers = layers if meta else [each.double() for each in layers]
        x = torch.randn(4096 if meta else 48, width, dtype=torch.float32 if meta else torch.float64)
    model = Regression(gspmd.pipeline(layers, mesh, loss=F.mse_loss, **options))
    gspmd.annotate(model, mesh, {"**.weight": "data _"})
    return model, x


@pytest.mark.parametrize(
    "mesh, count, width, options",
    (
        ("data=2,stage=2", 2, 6, {"microbatches": 4, "schedule": "1f1b"}),
        ("data=2,stage=2", 6, 5, {"microbatches": 4, "schedule": "zero_bubble"}),  # uneven rows
        ("data=3,stage=2", 4, 4, {"microbatches": 4, "schedule": "auto", "recompute": True}),
        ("data=2,stage=2", 8, 6, {"microbatches": 4, "schedule": "dualpipev"}),
        ("stage=2,data=2", 3, 6, {"microbatches": 2, "schedule": "gpipe"}),
    ),
)
def test_weights_gathered_in_each_microbatch(mesh, count, width, options):
    mesh = gspmd.Mesh.parse(mesh)
    model, x = stored_in_parts(mesh, count, width, **options)
    args = {"mesh": mesh, "grad": True, "in_specs": ("data _",)}
    kept, again = (
        gspmd.plan(model, x, advanced={"regather": way}, **args) for way in ("never", "always")
    )
    loss, gradients = again.simulate(x, _poison=True)
    expected = model(x)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), **EXACT)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, **EXACT)
    m = options["microbatches"]
    for kind, times in (("all_gather", 2 * m), ("reduce_scatter", m)):
        once, each = (
            sum(c.sent_bytes for c in plan.collectives if (c.kind, c.axes) == (kind, ("data",)))
            for plan in (kept, again)
        )
        # A recomputed forward gathers again.
        most = 2 if options.get("recompute") and kind == "all_gather" else 1
        assert once and times * once <= each <= most * times * once


def test_memory_decides_whether_a_stage_keeps_gathered_weights():
    mesh = gspmd.Mesh(data=4, stage=2)
    model, x = stored_in_parts(mesh, 8, 256, meta=True, microbatches=4, schedule="1f1b")

    def peak_of(**options):
        plan = gspmd.plan(model, x, mesh=mesh, grad=True, in_specs=("data _",), **options)
        return plan.memory.peak, sum(c.sent_bytes for c in plan.collectives)

    kept, again = (peak_of(advanced={"regather": way}) for way in ("never", "always"))
    assert again[0] < 0.75 * kept[0] and again[1] > 3 * kept[1]
    assert peak_of(memory={"budget": kept[0], "recompute": "auto"}) == kept
    assert peak_of(memory={"budget": (again[0] + kept[0]) // 2, "recompute": "auto"}) == again
