"""Modules that keep something from one call to the next in attributes: each check compares losses,
gradients and what is kept with a copy of the module on one device, over several calls.
"""

import collections
import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from language_model import error_of, whole
from ranks import distributed, on_cpu
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgspmd as gspmd

MESHES = ("data=2,model=2", "model=3")
WIDTH, STEPS = 7, 4  # which no mesh divides
MARKS = {"up.weight": "model _", "up.bias": "model", "down.weight": "_ model"}
TABLE: dict = {}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 6)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Recurrent(Net):
    """A hidden state in an attribute, None before the first call."""

    hidden = None

    def forward(self, x):
        h = self.up(x)
        self.hidden = torch.tanh(h if self.hidden is None else h + self.hidden)
        return self.down(self.hidden)


class Recomputed(Recurrent):
    def forward(self, x):
        y, self.hidden = checkpoint(self.inner, x, self.hidden, use_reentrant=False)
        return y

    def inner(self, x, hidden):
        h = torch.tanh(self.up(x) if hidden is None else self.up(x) + hidden)
        return self.down(h), h


class Part(nn.Module):
    """Of which the test calls the recurrent module by itself, too."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = Recurrent(), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.inner(x))


class Pair(Net):
    """Two tensors in a tuple, zeros at first, as an LSTM's."""

    def __init__(self):
        super().__init__()
        self.reset()

    def reset(self):
        self.hidden = torch.zeros(4, WIDTH), torch.zeros(4, WIDTH)

    def forward(self, x):
        c = 0.5 * self.hidden[1] + self.up(x)
        self.hidden = (torch.sigmoid(self.hidden[0]) * torch.tanh(c), c)
        return self.down(self.hidden[0])


class Spiking(Net):
    """A membrane that begins as one number."""

    def __init__(self):
        super().__init__()
        self.membrane = torch.zeros(1)

    def forward(self, x):
        self.membrane = 0.9 * self.membrane + self.up(x)
        spikes = torch.sigmoid(5 * (self.membrane - 1))
        self.membrane = self.membrane - spikes
        return self.down(spikes)


class Cached(Net):
    """A cache of fixed size that is no buffer, written in place."""

    def __init__(self):
        super().__init__()
        self.rows, self.filled = torch.zeros(STEPS * 4, 6), 0

    def forward(self, x):
        self.rows[self.filled : self.filled + len(x)] = x
        self.filled += len(x)
        return super().forward(self.rows[: self.filled]).mean(0)


class Normalized(Net):
    """Takes its shift from the first batch; means of a running kind that no buffer holds."""

    def __init__(self):
        super().__init__()
        self.ready, self.mean = False, torch.zeros(6)
        self.register_buffer("shift", torch.zeros(6))

    def forward(self, x):
        with torch.no_grad():
            if not self.ready:
                self.shift.copy_(x.mean(0))
                self.ready = True
            self.mean.mul_(0.5).add_(x.mean(0))
        return super().forward(x - self.shift + self.mean)


class Lists(Net):
    """A window of the last rows, a table, and a number in a list."""

    def __init__(self):
        super().__init__()
        self.last, self.table, self.calls = [], {}, [0]

    def forward(self, x):
        self.calls[0] += 1
        self.last.append(x.mean(0))
        if len(self.last) > 2:
            self.last.pop(0)
        self.table["sum"] = x + self.table.get("sum", 0.0)
        y = super().forward(x * self.calls[0] + torch.stack(self.last).mean(0) + self.table["sum"])
        if "first" in self.table and self.calls[0] > 2:
            del self.table["first"]
        elif self.calls[0] < 2:
            self.table["first"] = y
        return y


class Window(Net):
    """The last two rows, in a deque."""

    def __init__(self):
        super().__init__()
        self.last = collections.deque(maxlen=2)

    def forward(self, x):
        self.last.append(x.mean(0))
        return super().forward(x - sum(self.last) / len(self.last))


class Named(Net):
    """In a table of the program's file, and in an object that an attribute names."""

    def __init__(self):
        super().__init__()
        self.memory = Memory()

    def forward(self, x):
        TABLE[id(self)] = y = self.up(x) + TABLE.get(id(self), 0.0)
        return self.down(y) + self.memory.add(x).sum(0)


class Memory:
    def __init__(self):
        self.rows = None

    def add(self, x):
        self.rows = x if self.rows is None else torch.cat([self.rows, x])
        return self.rows


class Grows(Net):
    """Buffers that forward registers and makes longer."""

    def forward(self, x):
        if not hasattr(self, "angles") or len(self.angles) < len(x):
            self.register_buffer(
                "angles", torch.arange(len(x) * 6.0).view(-1, 6).cos(), persistent=False
            )
        return super().forward(x * self.angles[: len(x)])


def batch(step, rows=4):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(step))


def close(a, b):
    torch.testing.assert_close(whole(a).detach(), whole(b).detach(), rtol=1e-5, atol=1e-6)


def pair(mesh, kind):
    torch.manual_seed(0)
    reference = kind()
    model = copy.deepcopy(reference)
    gspmd.annotate(model, mesh, MARKS)
    return gspmd.parallelize(model, mesh), reference


def same_gradients(model, reference):
    wanted = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (wanted[name].grad is None), name
        if parameter.grad is not None:
            close(parameter.grad, wanted[name].grad)
        parameter.grad = wanted[name].grad = None


def kept(module):
    """The tensors and numbers that it keeps."""
    everything = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in ("training", "forward")
    }
    everything |= dict(module.named_buffers())
    found = torch.utils._pytree.tree_leaves(everything)
    return [vars(value)["rows"] if isinstance(value, Memory) else value for value in found]


def compare(mesh, kind, backward=True, rows=lambda step: 4):
    """Calls one after the other; returns the two modules."""
    model, reference = pair(mesh, kind)
    for step in range(STEPS):
        mine, theirs = model(batch(step, rows(step))), reference(batch(step, rows(step)))
        close(mine, theirs)
        left, right = kept(model._model), kept(reference)
        assert len(left) == len(right)
        for a, b in zip(left, right):
            if isinstance(b, torch.Tensor):
                close(a, b)
            else:
                assert type(a) is type(b) and a == b
        if backward:
            for y in (mine, theirs):
                y.square().sum().backward(retain_graph=True)  # through all calls up to here
            same_gradients(model, reference)
    return model, reference


@pytest.mark.parametrize("kind", [Recurrent, Recomputed, Pair, Spiking])
@distributed(*MESHES)
def test_hidden_states(mesh, kind):
    model, reference = compare(mesh, kind)
    programs = len(model._all_programs())
    assert programs <= 3, programs  # without a state, with a whole one, with one as it is laid out
    for _ in range(3):
        close(model(batch(9)), reference(batch(9)))
    assert len(model._all_programs()) == programs


@distributed(*MESHES)
def test_a_hidden_state_is_cut_and_begins_again(mesh):
    model, reference = compare(mesh, Recurrent)
    for m in (model, reference):  # truncated, then from the start again
        m.hidden = m.hidden.detach()
        m(batch(5)).square().sum().backward()
    same_gradients(model, reference)
    model.hidden = reference.hidden = None
    close(model(batch(6)), reference(batch(6)))


@distributed(*MESHES)
def test_a_submodule_by_itself(mesh):
    torch.manual_seed(0)
    reference = Part()
    model = gspmd.parallelize(copy.deepcopy(reference), mesh)
    found = [[m(batch(0)), m.inner(batch(1)), m(batch(2))] for m in (model, reference)]
    for mine, theirs in zip(*found):
        close(mine, theirs)
    for ys in found:
        sum(y.square().sum() for y in ys).backward()
    same_gradients(model, reference)


@distributed(*MESHES)
def test_changes_in_place(mesh):
    compare(mesh, Cached, backward=False)
    compare(mesh, Normalized)


@distributed(*MESHES)
def test_lists_and_tables(mesh):
    compare(mesh, Lists, backward=False)
    model, _ = compare(mesh, Window)
    assert len(model._all_programs()) == 3  # of none, one and two
    compare(mesh, Named, backward=False)


class Tasks(Net):
    """A hidden state for each of its tasks."""

    def __init__(self):
        super().__init__()
        self.hidden = {}

    def forward(self, x, task):
        self.hidden[task] = self.up(x) + 0.5 * self.hidden.get(task, 0.0)
        return self.down(self.hidden[task])


@distributed(*MESHES)
def test_states_by_name(mesh):
    model, reference = pair(mesh, Tasks)
    for step, task in enumerate("ababba"):
        close(model(batch(step), task), reference(batch(step), task))


@distributed(*MESHES)
def test_buffers_that_forward_registers(mesh):
    compare(mesh, Grows, rows=lambda step: [2, 4, 3, 5][step])


class Counts(Net):
    def __init__(self):
        super().__init__()
        self.calls, self.rows, self.length, self.seconds, self.ticks = 0, 0, None, 0.0, 0

    def forward(self, x):
        self.calls += 1
        self.rows = self.rows + len(x)
        self.length = len(x)
        self.seconds += 0.25
        for _ in range(200):
            self.ticks += 1
        return super().forward(x)


class Warms(Counts):
    def forward(self, x):
        y = super().forward(x)
        return y * min(self.calls / 3, 1.0) if self.calls % 2 else y - self.rows


@distributed(*MESHES)
def test_counters(mesh):
    """A number that forward counts up makes no program for every call; a branch by it two."""
    model, _ = compare(mesh, Counts)
    assert len(model._all_programs()) == 1
    assert (model.calls, model.rows, model.length, model.seconds, model.ticks) == (
        STEPS,
        4 * STEPS,
        4,
        STEPS / 4,
        200 * STEPS,
    )
    model(batch(0, 3))
    assert (model.calls, model.rows, model.length) == (STEPS + 1, 4 * STEPS + 3, 3)
    model, _ = compare(mesh, Warms)
    assert len(model._all_programs()) == 2 and model.calls == STEPS


class Annealed(Net):
    """A temperature that the caller sets, a rate that forward lowers, and a weight that is passed.
    is_exact: with a part that needs it.
    """

    is_exact = False

    def __init__(self):
        super().__init__()
        self.temperature, self.options, self.rate = 1.0, Options(), 1.0
        self.scales, self.options.weights = [1.0, 2.0], {"loss": {"first": 1.0}, "kept": [3.0]}

    def forward(self, x, weight, more):
        self.rate *= 0.9
        self.scales[0] *= 0.5
        y = super().forward(x) / self.temperature * (1 - self.rate) + self.options.power
        parts = [
            y * weight,
            y.bfloat16() * weight,
            y.double() * weight,
            y.sum() * weight,
            y.sum().bfloat16() * weight,
            weight - y,
            weight / (y.square() + 1),
            y + weight * (1 - weight),
            0.5**weight * y,
            y.clone().mul_(weight),
            (y > weight) * y,
            more["scales"][0] * y,
            y * -weight,
            y * self.scales[0] + self.options.weights["loss"]["first"],
            y * self.scales[0] * self.scales[1],
        ]
        if self.is_exact:
            parts += [
                torch.arange(4) * weight,
                torch.full((3,), weight),
                torch.tensor([weight, 2.0]),
            ]
        return parts


class Options:
    def __init__(self):
        self.power = 1


@distributed(*MESHES)
@on_cpu
def test_numbers_that_change(mesh):
    """Numbers that are others at every call are inputs of one program, in the types of PyTorch's
    scalars.
    """
    for is_exact, programs in ((False, 2), (True, STEPS)):
        model, reference = pair(mesh, Annealed)
        for step in range(STEPS):
            weight, results = 1 / (step + 2), []
            for m in (model, reference):
                m.is_exact, m.temperature, m.options.power = is_exact, 1 + 0.5 * step, step
                m.scales[1], m.options.weights["loss"]["first"] = 2.0 + step, 0.1 * step
                m.zero_grad()
                results.append(m(batch(step), weight, more={"scales": [3.0 * weight]}))
                sum(y.float().mean() for y in results[-1] if y.dtype != torch.bfloat16).backward()
            for got, want in zip(*results):
                tolerance = 2e-2 if got.dtype == torch.bfloat16 else 1e-5
                torch.testing.assert_close(
                    got.detach(), want.detach(), rtol=tolerance, atol=tolerance
                )
            assert model.rate == reference.rate and model.scales == reference.scales
            same_gradients(model, reference)
        assert len(model._all_programs()) == programs, len(model._all_programs())
        error = error_of(
            lambda model=model: model(batch(0), 0.5 + dist.get_rank(), more={"scales": [1.5]})
        )
        assert error.startswith("the arguments differ between ranks") and "1.5" in error, error


@distributed(*MESHES)
def test_a_detached_result(mesh):
    """y and y.detach() are one value, of which one has a gradient."""

    class Both(Net):
        def forward(self, x):
            y = super().forward(x)
            return y, y.detach()

    model, reference = pair(mesh, Both)
    for m in (model, reference):
        y, detached = m(batch(0))
        assert y.requires_grad and not detached.requires_grad
        (y * detached).sum().backward()
    same_gradients(model, reference)


class Quantizer(Net):
    """Words that move to the mean of what is near them, as parameters that forward replaces
    (VQ-VAE, arXiv 1711.00937, appendix A.1).
    """

    def __init__(self):
        super().__init__()
        self.words, self.sums = nn.Embedding(WIDTH, 6), nn.Parameter(torch.randn(WIDTH, 6))
        self.register_buffer("counts", torch.ones(WIDTH))

    def forward(self, x):
        x = super().forward(x)
        chosen = F.one_hot(torch.cdist(x, self.words.weight).argmin(-1), WIDTH).float()
        near = (chosen @ self.words.weight).detach()
        self.move(chosen, x)
        return x + (near - x).detach() + F.mse_loss(x, near)

    def move(self, chosen, x):
        self.counts = 0.9 * self.counts + chosen.sum(0)
        self.sums = nn.Parameter(0.9 * self.sums + chosen.t() @ x)
        self.words.weight = nn.Parameter(self.sums / self.counts.unsqueeze(1))


class QuantizerOfData(Quantizer):
    """The same by `.data = ...`; what is kept of the old data stays as it was."""

    def __init__(self):
        super().__init__()
        self.moved = torch.zeros(())

    def move(self, chosen, x):
        before = self.words.weight.data
        self.counts.data = 0.9 * self.counts + chosen.sum(0)
        self.sums.data = 0.9 * self.sums.data + chosen.t() @ x.detach()
        self.words.weight.data = self.sums.data / self.counts.unsqueeze(1)
        self.moved.data = (self.words.weight - before).detach().norm()
        before.zero_()


@distributed(*MESHES)
def test_parameters_that_forward_changes(mesh):
    for kind in (Quantizer, QuantizerOfData):
        model, reference = pair(mesh, kind)
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, reference)]
        for step in range(STEPS):
            losses = [m(batch(step)).square().mean() for m in (model, reference)]
            close(*losses)
            for loss, optimizer in zip(losses, optimizers):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            wanted = reference.state_dict()
            for name, value in model.state_dict().items():
                close(value, wanted[name])
            for a, b in zip(kept(model._model), kept(reference)):
                close(a, b)


class LooksAt(Net):
    """Branches on values of buffers and of a tensor in an attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("step", torch.tensor(0))
        self.depths = torch.tensor([1, 2])

    def forward(self, x):
        if not self.ready:
            self.mean.copy_(x.mean(0))
            self.ready.fill_(True)
        self.step += 1
        y = super().forward(x - self.mean) * self.step  # the number itself is computed with
        if self.step > 2:
            y = y + 1
        for _ in range(self.depths[1]):
            y = y.tanh()
        return y


@distributed(*MESHES)
def test_values_that_forward_looks_at(mesh):
    """A program for every outcome: without a mean, with one, and from the third step on."""
    model, _ = compare(mesh, LooksAt)
    assert len(model._all_programs()) == 3
    reference = LooksAt()
    reference.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
    for m in (model, reference):
        m.depths[1] = 1
        m.ready.fill_(False)
    close(model(batch(7)), reference(batch(7)))
    close(model.mean, reference.mean)


class Configured(Net):
    """With names in the order of a set, which is another one in each process."""

    def __init__(self):
        super().__init__()
        names = [f"option {i}" for i in range(20)]
        self.config = {
            "scale": 2.0,
            "defaults": list(set(names)),
            "by name": {name: len(name) for name in set(names)},
        }

    def forward(self, x, without):
        return (
            super().forward(x)
            * self.config["scale"]
            * self.config["by name"]["option 7"]
            * (1 if "first" in without else 2)
        )


@distributed(*MESHES)
def test_names_in_the_order_of_a_set(mesh):
    model, reference = pair(mesh, Configured)
    for without in ({"first", "second", "third", "fourth"}, frozenset({"second", "third"})):
        close(model(batch(1), without), reference(batch(1), without))


class Masked(Net):
    """Of features and rows by masks, in a buffer and in an attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.arange(6) > 2)
        self.kept = torch.arange(4) != 2

    def forward(self, x):
        y = super().forward(x)
        return y[self.kept].sum() + y[:, self.mask].exp().sum()


@distributed(*MESHES)
def test_masks_that_change(mesh):
    """A program for each of four masks; for more of them what they select is found when the program
    runs.
    """
    model, reference = pair(mesh, Masked)
    for step in range(9):
        for m in (model, reference):
            m.kept[0] = step < 8
            m.mask.data.copy_(torch.tensor([step + 1 >> i & 1 for i in range(6)]))
        mine, theirs = model(batch(step)), reference(batch(step))
        close(mine, theirs)
        mine.backward()
        theirs.backward()
    for p, q in zip(model.parameters(), reference.parameters()):
        close(p.grad, q.grad)
    assert len(model._all_programs()) == 6, len(model._all_programs())


ROUNDS, LAST = 0, None


def count_round():
    global ROUNDS
    ROUNDS += 1
    return ROUNDS


class Global(Net):
    """Global variables that forward, and a function that it calls, assign."""

    def forward(self, x):
        global LAST
        n = count_round()
        y = super().forward(x if LAST is None else x + LAST) * n
        LAST = y.mean().detach()
        return y + 1 if n % 2 else y


@distributed(*MESHES)
def test_global_variables(mesh):
    global ROUNDS, LAST
    found = []
    model, reference = pair(mesh, Global)
    for m in (model, reference):
        ROUNDS, LAST = 0, None
        found.append([m(batch(step)) for step in range(6)] + [LAST])
        assert ROUNDS == 6 and type(ROUNDS) is int
    for mine, theirs in zip(*found):
        close(mine, theirs)
    assert len(model._all_programs()) <= 4, len(
        model._all_programs()
    )  # without a last one, and for either outcome


class Settings:
    shift = 1.0


OPTIONS = SimpleNamespace(scale=1.0)


@distributed(*MESHES)
def test_what_forward_reads_by_name(mesh):
    """Attributes of classes and of objects that are global variables, and variables around a
    function.
    """
    power = 1.0

    def scaled(y):
        return y * power

    class Reads(Net):
        factors = [1.0, 2.0]

        def forward(self, x):
            return scaled(super().forward(x) * OPTIONS.scale * self.factors[1]) + Settings.shift

    def all_alike():
        close(model(batch(0)), reference(batch(0)))

    model, reference = pair(mesh, Reads)
    try:
        all_alike()
        Settings.shift = 2.0
        all_alike()
        OPTIONS.scale = 3.0
        all_alike()
        Reads.factors[1] = 4.0
        all_alike()
        power = 5.0
        all_alike()
        assert len(model._all_programs()) == 5
    finally:
        Settings.shift, OPTIONS.scale = 1.0, 1.0


@dataclass(slots=True)
class Seen:
    steps: int = 0
    mean: Any = None


def of_slots():
    """Nets that keep something in an object with slots, and what they have kept."""

    class Kept(Net):
        def __init__(self):
            super().__init__()
            self.seen = Seen()

        def forward(self, x):
            y = super().forward(x)
            self.seen.steps += 1
            self.seen.mean = (
                y.mean() if self.seen.mean is None else self.seen.mean.detach() + y.mean()
            )
            return y * self.seen.steps * self.seen.mean

    return Kept, lambda net: [net.seen.steps, net.seen.mean]


def of_classes():
    class Counter:
        steps, mean = 0, None

    class Kept(Net):
        calls = 0

        def forward(self, x):
            y = super().forward(x)
            Counter.steps += 2
            type(self).calls += 1
            if Counter.steps > 2:
                y = y + Counter.mean
            Counter.mean = y.detach().mean()
            Counter.last = y.detach().sum()
            return y * Counter.steps / type(self).calls

    return Kept, lambda net: [Counter.steps, Counter.mean, Counter.last, Kept.calls]


def of_hooks():
    steps, features, total = 0, None, torch.zeros(WIDTH)

    def hook(module, given, result):
        nonlocal steps, features
        steps, features = steps + 1, result.detach()
        total.add_(features.sum(0))
        return result * steps

    class Hooked(Net):
        def __init__(self):
            super().__init__()
            self.up.register_forward_hook(hook)

        def forward(self, x):
            return super().forward(x if features is None else x + features.mean())

    return Hooked, lambda net: [steps, features, total]


def of_methods():
    class Kept(Net):
        @classmethod
        def count(cls):
            cls.steps = getattr(cls, "steps", 0) + 1
            return cls.steps

        def forward(self, x):
            return super().forward(x) * self.count()

    return Kept, lambda net: [Kept.steps]


@distributed(*MESHES)
def test_slots_classes_and_variables_around_functions(mesh):
    for made in (of_slots, of_classes, of_hooks, of_methods):
        (kind, kept_by), (other, kept_by_other) = made(), made()
        model, _ = pair(mesh, kind)
        _, reference = pair(mesh, other)
        for step in range(5):
            for m in (model, reference):
                m(batch(step)).square().mean().backward()
            same_gradients(model, reference)
            for mine, theirs in zip(kept_by(model), kept_by_other(reference), strict=True):
                assert type(whole(mine)) is type(theirs), (made, mine, theirs)
                close(torch.as_tensor(mine), torch.as_tensor(theirs))
        assert len(model._all_programs()) <= 3, (made, len(model._all_programs()))


class TwoHeads(Net):
    """Results of which the third has nothing in common with the others, and a parameter that none
    needs.
    """

    def __init__(self):
        super().__init__()
        self.other, self.unused = nn.Linear(6, 3), nn.Parameter(torch.ones(3))

    def forward(self, x):
        y = super().forward(x)
        return y, y.square(), self.other(x)


@distributed(*MESHES)
def test_backwards_from_single_results(mesh):
    model, reference = pair(mesh, TwoHeads)
    for m in (model, reference):
        m.unused.register_hook(lambda gradient: gradient * 2)
        m.unused.register_post_accumulate_grad_hook(lambda p: p.grad.zero_())
        y, _, z = m(batch(0))
        y.sum().backward()
        z.square().sum().backward()  # nothing that it needs has been freed
    same_gradients(model, reference)
    for m in (model, reference):
        y, square, z = m(batch(1))
        (y.sum() + z.sum()).backward()
        try:
            square.sum().backward()
        except RuntimeError as error:
            assert "Trying to backward through the graph a second time" in str(error)
        else:
            raise AssertionError(type(m))
    same_gradients(model, reference)
    for m in (model, reference):
        y = m(batch(2))[0]
        m.up.weight.requires_grad_(False)
        y.square().sum().backward()
        m.up.weight.requires_grad_(True)
    same_gradients(model, reference)


class Truncated(Net):
    """A state whose history ends in forward."""

    hidden = None

    def forward(self, x):
        y = super().forward(x)
        self.hidden = y if self.hidden is None else y + self.hidden.detach()
        return self.hidden


@distributed(*MESHES)
def test_backward_through_time_that_forward_truncates(mesh):
    model, reference = pair(mesh, Truncated)
    for step in range(STEPS):
        for m in (model, reference):
            m(batch(step)).square().sum().backward()
        same_gradients(model, reference)
