"""Loops over experts that were chosen: sums for all that could be, or an error."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, rand
from torch import nn

import torchgspmd as gspmd
from torchgspmd.errors import ShardingError

EXPERTS, BEST, WIDTH = 5, 2, 6


class Experts(nn.Module):
    """Experts of which the router never chooses the last two. `loop` is that of a subclass."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS - 2)
        self.weights = nn.Parameter(rand(EXPERTS, WIDTH, WIDTH))
        self.scales = nn.ModuleDict({f"expert_{i}": nn.Linear(6, 6) for i in range(EXPERTS)})

    def forward(self, x):
        best, chosen = self.router(x).softmax(-1).topk(BEST)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)  # [experts, best, rows]
        hit = torch.greater(mask.sum((-1, -2)), 0).nonzero()
        return self.loop(x, hit, mask, best, torch.zeros_like(x))


class Stacked(Experts):
    def loop(self, x, hit, mask, best, out):
        for e in hit:
            at, rows = torch.where(mask[e].squeeze(0))
            y = (
                F.linear(x[None, rows].reshape(-1, WIDTH), self.weights[e[0]])
                * best[rows, at, None]
            )
            y *= 2
            out.index_add_(0, rows, y.to(x.dtype))
        return out


class Named(Experts):
    def loop(self, x, hit, mask, best, out):
        for e in hit.flatten():
            with torch.no_grad():
                at, rows = torch.where(mask[e])
            out[rows] += self.scales[f"expert_{e}"](x[rows]) * best[rows, at, None]
        return out


class Numbered(Experts):
    """The last experts pass rows on; a number leaves out experts without rows."""

    def loop(self, x, hit, mask, best, out):
        for each in hit:
            e = int(each.item())
            at, rows = torch.where(mask[e])
            if rows.numel() == 0:
                continue
            part = x[rows]
            if e >= 2:
                y = part
            else:
                y = F.linear(part, self.weights[e])
            out = out.index_add(0, rows, y * best[rows, at, None])
        return out


class Biased(Experts):
    """An expert that was chosen changes all rows."""

    def loop(self, x, hit, mask, best, out):
        everywhere = torch.arange(x.shape[0])
        for e in hit:
            out.index_add_(0, everywhere, self.weights[e[0], 0].expand_as(x))
        return out


class Assigned(Experts):
    def loop(self, x, hit, mask, best, out):
        for e in hit.squeeze(-1):
            out[:, e] = x[:, 0] * self.weights[e].sum()
        return out


class Twice(nn.Module):
    """Several layers, the second with what the first one chose."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Stacked(), Numbered()

    def forward(self, x):
        return self.two(x + self.one(x))


class Offset(Experts):
    """A class more than there are experts, as for padding: none has its rows."""

    def forward(self, x):
        best, chosen = self.router(x).softmax(-1).topk(BEST)
        chosen = self.placed(chosen)
        mask = F.one_hot(chosen, EXPERTS + 2).permute(2, 1, 0)
        hit = torch.greater(mask.sum((-1, -2)), 0).nonzero()
        return self.loop(x, hit, mask, best, torch.zeros_like(x))

    def placed(self, chosen):
        return chosen


class OfTensors(Offset, Stacked):
    pass


TENSORS = pytest.param(
    OfTensors,
    marks=pytest.mark.skipif(
        torch.__version__ < "2.10", reason="a trace of torch 2.9 lets an index beyond the rows pass"
    ),
)


class OfModules(Offset):
    def loop(self, x, hit, mask, best, out):
        for e in hit:
            at, rows = torch.where(mask[e[0]])
            out[rows] += self.scales[f"expert_{e[0]}"](x[rows]) * best[rows, at, None]
        return out


@pytest.mark.parametrize(
    "kind", [Stacked, Named, Numbered, TENSORS, OfModules, Biased, Assigned, Twice]
)
@pytest.mark.parametrize("rows", [7, 1])
def test_what_was_not_chosen_adds_nothing(kind, rows):
    torch.manual_seed(0)
    model, mesh = kind().double(), gspmd.Mesh(data=2, model=2)
    for name, weight in model.named_parameters():
        spec = "model data _" if weight.dim() == 3 else "model _" if weight.dim() == 2 else "model"
        if name.endswith(("weights", "weight")):
            gspmd.mark_sharding(weight, mesh, spec)
    x = rand(rows, WIDTH).double()
    plan = gspmd.plan(model, x, mesh=mesh, in_specs="data _", grad=True)
    for _ in range(2):  # other experts
        got, gradients = plan.simulate(x, _poison=True)
        want = model(x)
        assert_same(got, want, kind.__name__)
        wanted = torch.autograd.grad(want.sum(), [*model.parameters()], allow_unused=True)
        for (name, _), gradient in zip(model.named_parameters(), wanted):
            if gradient is not None:
                assert_same(gradients[name], gradient, name, terms=rows * EXPERTS * WIDTH**2)
        x = rand(rows, WIDTH).double().flip(0) * 3


class Summed(Experts):
    def loop(self, x, hit, mask, best, out):
        for e in hit:
            out = out + x @ self.weights[e[0]]
        return out


class Listed(Experts):
    def loop(self, x, hit, mask, best, out):
        parts = [out]
        for e in hit:
            parts.append(x @ self.weights[e[0]])
        return sum(parts)


class InPlace(Experts):
    def loop(self, x, hit, mask, best, out):
        for e in hit:
            same = out
            same += x @ self.weights[e[0]]
        return out


class Last(Experts):
    def loop(self, x, hit, mask, best, out):
        for e in hit:
            y = x @ self.weights[e[0]]
        return y + out


class Left(Experts):
    def loop(self, x, hit, mask, best, out):
        for e in hit:
            out.index_add_(0, torch.arange(x.shape[0]), x @ self.weights[e[0]])
            break
        return out


class Before(Experts):
    def loop(self, x, hit, mask, best, out):
        y = x
        for e in hit:
            out.index_add_(0, torch.arange(x.shape[0]), y @ self.weights[e[0]])
            y = y * 2
        return out


class OtherRows(Experts):
    """Leaves experts without rows, and adds to others than those."""

    def loop(self, x, hit, mask, best, out):
        for e in hit:
            at, rows = torch.where(mask[e[0]])
            if rows.numel() == 0:
                continue
            out.index_add_(0, torch.arange(x.shape[0]), x @ self.weights[e[0]])
        return out


class Elsewhere(Experts):
    """A function that the loop calls changes a variable, another one a buffer."""

    def loop(self, x, hit, mask, best, out):
        for e in hit:
            y = self.changed(out, self.weights[e[0]])
            out.index_add_(0, torch.arange(x.shape[0]), y)
        return out

    def changed(self, out, w):
        out += w[0]
        return out * 2


class Counted(Elsewhere):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def changed(self, out, w):
        self.calls += 1
        return out * w[0]


@pytest.mark.parametrize(
    "kind", [Elsewhere, Counted, Summed, Listed, InPlace, Last, Left, Before, OtherRows]
)
def test_other_effects_of_a_loop_are_an_error(kind):
    with pytest.raises(ShardingError, match="a loop over '?(hit|what values chose)"):
        gspmd.plan(kind(), rand(7, WIDTH), mesh=gspmd.Mesh(data=2))


@pytest.mark.parametrize("kind", [TENSORS, OfModules])
def test_a_run_that_has_it_raises(kind):
    class Beyond(kind):
        def placed(self, chosen):
            return chosen + torch.where(chosen == 0, EXPERTS + 1, 0)

    torch.manual_seed(0)
    model, x = Beyond().double(), rand(8, WIDTH).double()
    with pytest.raises((IndexError, KeyError)) as eager:
        model(x)
    with pytest.raises(eager.type, match="6"):
        gspmd.plan(model, x, mesh=gspmd.Mesh(data=2)).simulate(x)


class Caught(OfModules):
    """An iteration's error that the program catches, and another error behind it."""

    def loop(self, x, hit, mask, best, out):
        try:
            return super().loop(x, hit, mask, best, out)
        except KeyError:
            return [out][EXPERTS]


def test_another_error_behind_a_loop_is_the_programs_own():
    with pytest.raises(IndexError, match="list index out of range"):
        gspmd.plan(Caught().double(), rand(8, WIDTH).double(), mesh=gspmd.Mesh(data=2))
