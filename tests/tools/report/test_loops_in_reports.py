"""A loop in what a plan says: its body counts for all iterations; files have the bodies."""

import torch
from torch import nn
from torch._higher_order_ops import scan

import torchgspmd as gspmd
from torchgspmd import Mesh, Plan
from torchgspmd.fx_passes.printer import program_text

MESH, WIDTH, HIDDEN = Mesh(data=2, model=2), 64, 512


def layer(h, weights):
    up, down = weights
    return h + (h @ up).relu() @ down, h.new_zeros(())


class Layers(nn.Module):
    """The loss of microbatches x [m, b, d]; layers and microbatches are loops, or are not."""

    def __init__(self, count: int, loops: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(count, WIDTH, HIDDEN) / 8)
        self.down = nn.Parameter(torch.randn(count, HIDDEN, WIDTH) / 32)
        gspmd.annotate(self, MESH, {"up": "_ _ model", "down": "_ model _"})
        self.loops = loops

    def one(self, h):
        if self.loops:
            return scan(layer, h, (self.up, self.down))[0].square().mean()
        for weights in zip(self.up, self.down):
            h, _ = layer(h, weights)
        return h.square().mean()

    def forward(self, x):
        if not self.loops:
            return sum(self.one(h) for h in x)
        return scan(lambda total, h: (total + self.one(h), h.sum()), x.new_zeros(()), x)[0]


def planned(model, microbatches=3, grad=True):
    x = torch.randn(microbatches, 256, WIDTH)
    return gspmd.plan(model, x, mesh=MESH, in_specs="_ data _", grad=grad), x


def test_a_report_counts_all_iterations():
    plan, unrolled = planned(Layers(4))[0], planned(Layers(4, loops=False))[0]
    report, other = plan.report(), unrolled.report()
    assert sum(row.sent_bytes for row in report.collectives) == plan.sent_bytes
    assert sum(row.count for row in report.collectives) == sum(c.count for c in plan.collectives)
    first = 3 * 2 * 256 * WIDTH * HIDDEN  # a loop has the gradient of its first carry as well
    assert report.estimate.model_flops == other.estimate.model_flops + first
    assert report.estimate.flops == other.estimate.flops + first // MESH.size
    busy = [e.busy("communication") for e in (report.estimate, other.estimate)]
    assert 0.5 < busy[0] / busy[1] < 1.5
    assert 0.8 < report.memory.peak / other.memory.peak < 1.4
    assert plan.memory.peak >= report.memory.peak
    assert "_start x 12" in plan.trace()
    assert ", 1x3/2x4)  x 12\n" in plan.text(full=True)
    assert "body of loop_2x4, x 4\n" in program_text(plan.program.graph)


def test_an_iteration_takes_the_same_time_each():
    seconds = [planned(Layers(n), grad=False)[0].estimate().busy("compute") for n in (2, 4, 8)]
    assert abs((seconds[2] - seconds[1]) - 2 * (seconds[1] - seconds[0])) < 1e-9 < seconds[0]


def test_what_an_iteration_needs_is_in_the_peak():
    """A value [256 / 2, 512 / 2] is alive in the body alone."""
    plan, _ = planned(Layers(2), grad=False)
    outside = plan.memory.parameters + plan.memory.inputs
    assert plan.memory.peak >= outside + 128 * 256 * 4


def test_a_plan_with_loops_is_saved(tmp_path):
    model = Layers(4)
    plan, x = planned(model)
    plan.save(tmp_path / "plan")
    again = Plan.load(tmp_path / "plan", model)
    assert again.text(full=True) == plan.text(full=True) and str(again.report()) == str(
        plan.report()
    )
    assert program_text(again.program.graph) == program_text(plan.program.graph)
    (one, gradients), (other, others) = plan.simulate(x), again.simulate(x)
    assert one.equal(other) and all(gradients[k].equal(others[k]) for k in gradients)


def test_a_pipeline_of_any_length_is_saved(tmp_path):
    """Stages without the loss find the size of its gradient in a file, too."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            mesh, blocks = Mesh(stage=2), [nn.Linear(4, 4).double() for _ in range(2)]
            options = {"microbatches": 2, "schedule": "1f1b"}
            self.blocks = gspmd.pipeline(blocks, mesh, loss=lambda y: y.square().mean(), **options)

        def forward(self, x):
            return self.blocks(x)

    def numbers(length):
        return torch.linspace(-1, 1, 16 * length, dtype=torch.float64).view(4, length, 4)

    model = Model()
    plan = gspmd.plan(
        model, numbers(5), mesh=Mesh(stage=2), grad=True, dynamic={"x": {1: "length"}}
    )
    plan.save(tmp_path / "plan")
    again = Plan.load(tmp_path / "plan", model)
    assert program_text(again.program.graph) == program_text(plan.program.graph)
    loss, gradients = again.simulate(numbers(7))
    expected = model(numbers(7))
    torch.testing.assert_close(loss, expected)
    wanted = torch.autograd.grad(expected, [*model.parameters()])
    for (name, _), gradient in zip(model.named_parameters(), wanted):
        torch.testing.assert_close(gradients[name], gradient)
