"""What users do with a wrapped module, against one process, on every rank."""

import copy
import os
import warnings
from collections import namedtuple
from types import SimpleNamespace

import language_model
import torch
import torch.distributed as dist
import torch.nn.functional as F
from language_model import (
    WORDS,
    Counting,
    Model,
    Options,
    close,
    error_of,
    loss_of,
    pair,
    same_gradients,
    same_parameters,
    tokens,
    whole,
)
from ranks import distributed, on_cpu
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import torchgspmd as gspmd

MESHES = ("data=2,model=2", "model=3")
Result = namedtuple("Result", "logits norm")


class WithPenalty(Model):
    def forward(self, tokens):
        loss = F.cross_entropy(super().forward(tokens).flatten(0, 1), tokens.flatten())
        return loss + sum(
            g.square().sum()
            for g in torch.autograd.grad(
                loss, [self.up.weight, self.down.weight], create_graph=True
            )
        )


class WithKinds(Model):
    def forward(self, tokens, *, scale=1.0, more=None, change=None, by=None):
        logits = super().forward(tokens) * scale + more["bias"]
        logits = logits if change is None else change(logits) * by.scale + by.tensor
        return {
            "result": Result(logits, logits.norm()),
            "none": None,
            "text": "hi",
            "list": [3, (logits.mean(),)],
        }


@distributed(*MESHES)
def test_several_forwards_before_a_backward(mesh):
    model, reference = pair(mesh)
    for m in (model, reference):
        (loss_of(m, 0) + 2 * loss_of(m, 1, rows=3)).backward()
        kept = loss_of(m, 2)
        kept.backward(retain_graph=True)
        kept.backward()
    same_gradients(model, reference)


@distributed(*MESHES)
def test_recomputation(mesh):
    """A checkpoint around the calls, the first of which is inside of one."""
    for reentrant in (False, True):
        model, reference = pair(mesh, WithParts)
        for m in (model, reference):
            hidden = torch.ones(3, 16, requires_grad=True)
            for layer in m.layers:
                hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
            hidden.square().mean().backward()
            if not reentrant:
                checkpoint(m, tokens(), use_reentrant=False).square().mean().backward()
        same_gradients(model, reference)


def stepping(optimizer):
    def hook(_):
        optimizer.step()
        optimizer.zero_grad()

    return hook


@distributed(*MESHES)
def test_hooks_of_gradients(mesh):
    """On parameters, also for an optimizer inside of the backward."""
    model, reference = pair(mesh)
    for m in (model, reference):
        m.up.weight.register_hook(lambda g: 2 * g)
        for p in m.parameters():
            p.register_post_accumulate_grad_hook(stepping(torch.optim.SGD([p], 0.1)))
        for step in range(3):
            loss_of(m, step).backward()
    same_parameters(model, reference)


@distributed(*MESHES)
def test_copies(mesh):
    """A running mean of the weights (EMA) is kept in a deep copy, which computes by itself."""
    model, reference = pair(mesh)
    means = []
    for m in (model, reference):
        loss_of(m).backward()  # there is a program when it is copied
        mean, optimizer = (
            AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
            torch.optim.SGD(m.parameters(), 0.1),
        )
        for step in range(3):
            optimizer.zero_grad()
            loss_of(m, step).backward()
            optimizer.step()
            mean.update_parameters(m)
        means.append(mean)
    close(*(mean(tokens()) for mean in means))
    same_parameters(*means)
    same_parameters(model, reference)
    assert "cannot be pickled" in error_of(lambda: torch.save(model, os.devnull))


@distributed(*MESHES)
def test_states(mesh):
    """Whole tensors can be loaded, by load_state_dict and by torch's checkpoint functions; what is
    trained on goes on.
    """
    model, reference = pair(mesh)
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(1.5)
    model.load_state_dict(reference.state_dict())
    same_parameters(model, reference)
    options = StateDictOptions(full_state_dict=True)
    for name, tensor in get_model_state_dict(model, options=options).items():
        assert torch.equal(tensor, reference.state_dict()[name]), name
    other, _ = pair(mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3) for m in (model, reference, other)]
    for m, optimizer in zip((model, reference), optimizers):
        loss_of(m).backward()
        optimizer.step()
    weights, moments = get_state_dict(model, optimizers[0], options=options)
    set_state_dict(
        other, optimizers[2], model_state_dict=weights, optim_state_dict=moments, options=options
    )
    for m, optimizer in zip((other, reference), optimizers[2:0:-1]):
        optimizer.zero_grad()
        loss_of(m, 1).backward()
        optimizer.step()
    same_parameters(other, reference, 1e-4)  # AdamW divides by small second moments


@distributed(*MESHES)
def test_other_types(mesh):
    """After .double() parameters are new ones, without a mark."""
    model, reference = pair(mesh)
    loss_of(model)
    for m in (model.double(), reference.double()):
        loss_of(m).backward()
    assert model.up.weight.grad.dtype == torch.float64
    same_gradients(model, reference)


@distributed("model=3")
@on_cpu
def test_attributes(mesh):
    """What forward reads may change between calls; what it writes does not make a program for every
    call.
    """
    model, reference = pair(mesh, Counting)
    programs = []

    def compare():
        close(model(tokens()), reference(tokens()))
        programs.append(len(model._all_programs()))

    compare()
    compare()
    for name, value in (
        ("temperature", 2.0),
        ("sign", -1),
        ("unused", 3),
        ("temperature", 1.0),
        ("sign", 1),
    ):
        for m in (model, reference):
            setattr(m, name, value)
        compare()
    for m in (model, reference):
        m.scales[1] = 5.0
    compare()
    assert programs == [1, 1, 2, 3, 3, 3, 4, 5], programs
    for m in (model, reference):
        m.dropout.p = 1.0
    compare()
    model, reference = pair(mesh)
    close(model(tokens()), reference(tokens()))
    for change in (
        lambda m: setattr(m.options, "scale", 2.0),
        lambda m: setattr(m.options.inner, "power", 3),
        lambda m: setattr(language_model, "OFFSET", 1.5),
        lambda m: setattr(m, "options", Options()),
        lambda m: m.double(),
        lambda m: setattr(language_model, "OFFSET", 1.0),
    ):
        for m in (model, reference):
            change(m)
        close(model(tokens()), reference(tokens()))
    torch.set_default_dtype(torch.float64)
    close(model(tokens()), reference(tokens()))
    torch.set_default_dtype(torch.float32)
    model, reference = pair(mesh)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(9):
            for m in (model, reference):
                m.temperature, m.scales = 1 + step / 8, (1.0, 1 + step / 4, *range(step))
            compare()
    assert programs[-2:] == [8, 8] and any(
        "since forward reads" in str(w.message) and "'scales'" in str(w.message) for w in caught
    )
    for before in ((1.0,), (1.0, 2.0, 4.0)):  # it may be an input of the program by then
        model, _ = pair(mesh)
        for model.temperature in before:
            model(tokens())
        if dist.get_rank() == 0:
            model.temperature = 3.0
        assert error_of(lambda model=model: model(tokens())).startswith(
            "the models differ between ranks"
        )


def doubled(module, inputs, output):
    return 2 * output


class Pictures(nn.Module):
    """Multiplies each picture by its height, of which it makes a list."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 6)

    def forward(self, x, sizes):
        heights = sizes[:, 0].repeat_interleave(sizes[:, 0] * 0 + 1)  # of unknown length
        return sum(row.square().mean() * n for row, n in zip(self.head(x), heights.tolist()))


@distributed("data=2")
def test_whole_numbers_of_arguments(mesh):
    torch.manual_seed(0)
    model = Pictures()
    reference = copy.deepcopy(model)
    gspmd.mark_sharding(model.head.weight, mesh, "data _")
    model = gspmd.parallelize(model, mesh, in_specs=("data _", None))
    x, programs = torch.randn(2, 6), []
    for sizes in ([[2, 3], [4, 1]], [[5, 3], [4, 1]], [[2, 3], [4, 1]]):
        loss, want = model(x, torch.tensor(sizes)), reference(x, torch.tensor(sizes))
        close(loss, want)
        loss.backward(), want.backward()
        same_gradients(model, reference)
        programs.append(len(model._all_programs()))
    assert programs == [1, 2, 2], programs


@distributed(*MESHES)
def test_other_modules(mesh):
    model, reference = pair(mesh)
    model(tokens())
    for m in (model, reference):
        m.head = nn.Sequential(m.head, nn.GELU())
        m.shift = torch.arange(float(WORDS))
    close(model(tokens()), reference(tokens()))
    for m in (model, reference):
        m.shift = torch.ones(1)
    close(model(tokens()), reference(tokens()))
    made = []
    for _ in range(2):
        handles = [m.up.register_forward_hook(doubled) for m in (model, reference)]
        close(model(tokens()), reference(tokens()))
        made.append(len(model._all_programs()))
        for handle in handles:
            handle.remove()
    assert made[0] == made[1], made
    for m in (model, reference):
        m.down.forward = lambda x, m=m: 3 * F.linear(x, m.down.weight)
    close(model(tokens()), reference(tokens()))
    assert error_of(lambda: gspmd.parallelize(nn.Sequential(model), mesh)).startswith(
        "a module is on a mesh already"
    )
    model.head = nn.Linear(16, WORDS)
    assert error_of(lambda: model(tokens())).startswith("parameter 'head.weight' is a plain tensor")


@distributed(*MESHES)
def test_methods(mesh):
    """A method of the model that calls it runs on the mesh."""
    model, reference = pair(mesh)
    for _ in range(2):
        assert torch.equal(model.generate(tokens(), 3), reference.generate(tokens(), 3))
    assert len(model._all_programs()) == 2  # of the first length, of the others
    loss_of(model)


SEEN: list = []


class Leaves(nn.Module):
    def forward(self, x):
        SEEN.append(x.mean())
        return x


class WithCache(Model):
    """Keeps keys of earlier tokens in an object that its caller passes, and a loss of its own in an
    attribute.
    """

    def __init__(self):
        super().__init__()
        self.mask, self.losses, self.seen, self.leaves = torch.ones(WORDS), None, [], Leaves()

    def forward(self, tokens, cache=None):
        keys = self.up(self.embedding(tokens))
        if keys.requires_grad:
            keys.register_hook(lambda grad: self.seen.append(grad))
        if cache is not None:
            cache.keys = keys = torch.cat([cache.keys, keys], 1) if cache.keys is not None else keys
            cache.rows.append(tokens.shape[1])
        self.losses = self.leaves(keys).square().mean(), keys.mean(-1)  # [], [b, s]
        return self.head(self.down(F.gelu(keys)).mean(1)) * self.mask


@distributed(*MESHES)
def test_what_forward_leaves(mesh):
    """In objects that are passed, and in attributes; with their gradients."""
    model, reference = pair(mesh, WithCache)
    left = []
    for m in (model, reference):
        cache, kept = SimpleNamespace(keys=None, rows=[]), []
        for step in range(3):
            with torch.no_grad():
                kept.append(m(tokens(step), cache))
        assert cache.rows == [5, 5, 5]
        loss = m(tokens(3)).square().mean() + 2 * m.losses[0] + whole(m.losses[1]).sum()
        loss.backward()
        m.mask = torch.arange(float(WORDS))  # another tensor, not a parameter and not a buffer
        prefix = SimpleNamespace(keys=None, rows=[])
        m(tokens(4), prefix)
        m(tokens(5), prefix).square().mean().backward()  # through what is in the cache
        left.append(
            (*kept, cache.keys, loss, m(tokens(6)), m.losses[0], m.losses[1], *m.seen, *SEEN)
        )
        assert len(m.seen) == 3 and len(SEEN) == 7
        SEEN.clear()
    for mine, theirs in zip(*left):
        close(mine, theirs)
    same_gradients(model, reference)
    programs = len(model._all_programs())
    for _ in range(2):
        model.seen = []  # another list, which the program finds
        model(tokens(6)).square().mean().backward()
        assert len(model.seen) == 1 and model.losses is not None
    assert (
        len(model._all_programs()) == programs
    )  # what a run has left makes no program for the next


class WithParts(Model):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.Linear(32, 16))
                for _ in range(2)
            ]
        )

    def encode(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x

    def embed(self, tokens):
        return self.encode(self.embedding(tokens).mean(1))

    def forward(self, tokens):
        return self.head(self.embed(tokens))


@distributed(*MESHES)
def test_submodules(mesh):
    """Called by themselves, by their caller or in a method of the model."""
    model, reference = pair(mesh, WithParts)
    seen, found = [], []
    for m in (model, reference):
        m.layers[1].register_forward_hook(lambda *_: seen.append(1))
        for copied in (m, copy.deepcopy(m)):
            calls = len(seen)
            copied.embed(tokens()).square().sum().backward()
            x = copied.layers[0](torch.ones(3, 16))
            assert len(seen) == calls + 1  # once each time, as it is no part of a program
            copied.eval()
            found.append(
                (
                    x,
                    copied.layers[0](x),
                    copied.layers[0][1].running_mean,
                    copied.embed(tokens(1)),
                    copied(tokens(2)),
                )
            )
            copied.train()
            x.sum().backward()
            found[-1] += tuple(p.grad for p in copied.parameters() if p.grad is not None)
    for mine, theirs in zip(found[:2], found[2:]):
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs):
            scale = max(1.0, float(whole(b).abs().max()))  # gradients are sums of many squares
            close(whole(a) / scale, whole(b) / scale)


@distributed(*MESHES)
def test_layouts_of_results(mesh):
    """Also such as DTensors do not express: the nearest one that they do."""
    one, other = mesh.names[0], mesh.names[-1]
    for rows in (8, 5):
        x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))
        for spec in (
            f"{one} _",
            f"_ {other}",
            "? ?",
            *((f"{one}+{other} _", f"{other}+{one} _") if one != other else ()),
        ):
            for given in (None, spec.replace("?", "_")):
                close(
                    gspmd.parallelize(nn.Tanh(), mesh, in_specs=given, out_specs=spec)(x), x.tanh()
                )


@distributed(*MESHES)
def test_second_order(mesh):
    """A penalty on gradients is computed in forward; one outside would lose its gradient, and is an
    error.
    """
    model, reference = pair(mesh, WithPenalty)
    for m in (model, reference):
        m(tokens()).backward()
    same_gradients(model, reference)
    model, _ = pair(mesh)
    gradients = torch.autograd.grad(loss_of(model), list(model.parameters()), create_graph=True)
    penalty = sum(whole(g).square().sum() for g in gradients)
    assert error_of((loss_of(model) + penalty).backward).startswith(
        "a gradient of a sharded module is differentiated again"
    )


@distributed(*MESHES)
def test_gradients_of_some_results(mesh):
    """Parameters from which no result with a cotangent comes have no gradient, and no optimizer
    changes them. Also under torch.compile.
    """

    class Middle(Model):
        def forward(self, tokens):
            middle = self.up(self.embedding(tokens))
            return {"middle": middle, "logits": self.head(self.down(middle))}

    model, reference = pair(mesh, Middle)
    optimizers = [
        torch.optim.AdamW(m.parameters(), 0.1, weight_decay=0.5) for m in (model, reference)
    ]
    for used in (["middle"], ["logits"], ["middle", "logits"], ["middle"]):
        for call, optimizer in zip((torch.compile(model, backend="eager"), reference), optimizers):
            results = call(tokens())
            sum(results[name].square().mean() for name in used).backward()
            optimizer.step()
        same_gradients(model, reference)
        same_parameters(model, reference, 1e-4)
        for optimizer in optimizers:
            optimizer.zero_grad()


@distributed(*MESHES)
def test_gradients_of_results(mesh):
    """retain_grad on a result is whole, or an error if another follows from it in the program."""

    class Middle(Model):
        def forward(self, tokens):
            middle = self.up(self.embedding(tokens))
            logits = self.head(self.down(middle))
            first, rest = logits.split([1, logits.shape[-1] - 1], -1)
            return {"middle": middle, "logits": logits, "first": first, "rest": rest}

    model, reference = pair(mesh, Middle)

    def gradients(each, kept, used):
        results = each(tokens())
        for name in kept:
            results[name].retain_grad()
        sum(results[name].square().sum() for name in used).backward()
        return [results[name].grad for name in kept]

    for kept, used in (
        (["middle"], ["middle"]),
        (["logits", "middle"], ["middle"]),
        (["first"], ["first", "rest"]),
        (["rest", "logits"], ["logits"]),
    ):
        for mine, theirs in zip(*(gradients(m, kept, used) for m in (model, reference))):
            assert (mine is None) == (theirs is None)
            if theirs is not None:
                close(whole(mine), theirs)
    for kept, used in ((["middle"], ["middle", "logits"]), (["logits"], ["rest"])):
        said = error_of(lambda kept=kept, used=used: gradients(model, kept, used))
        assert "from which the model computes another result" in said
    found = []
    for each in (model, reference):
        kept = []
        hook = each.up.register_forward_hook(
            lambda module, args, y, kept=kept: (y.register_hook(kept.append), None)[1]
        )
        gradients(each, [], ["middle", "logits"])
        hook.remove()
        found += kept
    close(whole(found[0]), found[1])


@distributed(*MESHES)
def test_results_without_elements(mesh):
    """A batch of no rows has a gradient, of zeros, and takes none from the results beside it."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(6, n) for n in (3, 4, 5))
            self.norm = nn.RMSNorm(6)

        def forward(self, *parts):
            return [head(self.norm(x)) for head, x in zip(self.heads, parts)]

    reference = Heads()
    model = copy.deepcopy(reference)
    gspmd.annotate(model, mesh, {"heads.*.weight": f"_ {mesh.names[-1]}"})
    model = gspmd.parallelize(model, mesh)
    for counts in ((0, 2, 3), (2, 0, 0), (3, 0, 2), (0, 0, 0)):
        parts = [torch.randn(n, 6) for n in counts]
        for each in (model, reference):
            each.zero_grad()
            results = each(*parts)
            assert all(y.requires_grad for y in results)
            sum((i + 2) * y.square().sum() for i, y in enumerate(results)).backward()
        same_gradients(model, reference)
    alone = model.heads[0](torch.randn(0, 6, requires_grad=True))
    assert alone.requires_grad and alone.shape == (0, 3)


@distributed(*MESHES)
def test_results_of_all_kinds(mesh):
    model, reference = pair(mesh, WithKinds)
    got, want = (
        m(tokens(), scale=3.0, more={"bias": torch.ones(WORDS)}) for m in (model, reference)
    )
    assert (
        type(got["result"]) is Result
        and got["none"] is None
        and got["text"] == "hi"
        and got["list"][0] == 3
    )
    close(got["result"].logits, want["result"].logits)
    close(got["list"][1][0], want["list"][1][0])
    more = {"bias": 0.0}
    for scale, tensor in ((2.0, 1.0), (2.0, 3.0), (4.0, 3.0)):
        by = SimpleNamespace(scale=scale, tensor=torch.tensor(tensor))
        got, want = (
            m(tokens(), more=more, change=lambda x: x.tanh(), by=by) for m in (model, reference)
        )
        close(got["result"].logits, want["result"].logits)
    for factor in (1.0, 2.0, 3.0):  # functions that may lie at one address, one after the other
        got, want = (
            m(tokens(), more=more, change=lambda x, f=factor: x * f, by=by)
            for m in (model, reference)
        )
        close(got["result"].logits, want["result"].logits)
    rows = 6 if dist.get_rank() == 0 else 4
    error = error_of(lambda: model(tokens(rows=rows), more=more, change=torch.tanh, by=by))
    assert error.startswith("the arguments differ between ranks"), error
    with torch.inference_mode():
        close(
            model(tokens(), more={"bias": 0.0})["result"].norm,
            reference(tokens(), more={"bias": 0.0})["result"].norm,
        )
    with torch.autograd.detect_anomaly(check_nan=True):
        model(tokens(), more={"bias": 1.0})["result"].norm.backward()


@distributed(*MESHES)
def test_what_cannot_be(mesh):
    model, _ = pair(mesh)
    x = tokens()
    assert error_of(lambda: torch.func.vmap(model)(x)).startswith(
        "torch.func transforms a module on a mesh"
    )
    parameters = dict(model.named_parameters())
    loss = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())
    assert error_of(lambda: loss(parameters)).startswith("torch.func transforms a module on a mesh")
    for send in (
        dist.all_reduce,
        lambda y: dist.all_gather([torch.empty_like(y) for _ in range(mesh.size)], y),
        lambda y: dist.barrier(),
    ):

        class Sends(Model):
            def forward(self, tokens, send=send):
                y = super().forward(tokens).mean()
                send(y)
                return y

        assert error_of(lambda: pair(mesh, Sends)[0](x)).startswith(
            "the program communicates by itself, through torch.distributed"
        )
    assert error_of(model.compile).startswith("a module on a mesh is compiled by its backend")
    assert error_of(lambda: gspmd.parallelize(nn.LazyLinear(3), mesh)).startswith(
        "parameter 'weight' has no shape yet"
    )
    close(model(x), model(x))
