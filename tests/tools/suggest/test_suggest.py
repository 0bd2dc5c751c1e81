"""suggest finds what trying everything finds, keeps to the memory, and its code runs."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Hardware, moe
from torchgspmd.comm.hardware import Link
from torchgspmd.tools.suggest import candidates, search
from torchgspmd.tools.suggest.judge import Judge
from torchgspmd.tools.suggest.layers import Layers
from torchgspmd.tools.suggest.proposal import Group, Marks, Proposal, Savings, patterns_of
from torchgspmd.tools.suggest.step_numbers import Numbers, has_solver

# Slow products and fast links: weights are worth dividing. The other way round: they are not.
SLOW_PRODUCTS = Hardware("slow", {4: 1e9}, 1e12, 1e9, (Link(8, 1e9, 1e-7),), launch=0.0)
SLOW_LINKS = Hardware("links", {4: 1e12}, 1e12, 1e9, (Link(8, 1e6, 1e-4),), launch=0.0)


class Feed(nn.Module):
    """Two products, of which the weights are large beside the tokens."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x))).square().mean()


class Classes(nn.Module):
    """A table of words and a head."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)

    def forward(self, tokens):
        return F.cross_entropy(self.head(self.table(tokens)), tokens)


class Deep(nn.Module):
    def __init__(self, layers: int = 6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


MODELS = {
    "feed": (Feed, lambda: torch.zeros(8, 32)),
    "classes": (Classes, lambda: torch.zeros(8, dtype=torch.long)),
}


@pytest.mark.parametrize("hardware", [SLOW_PRODUCTS, SLOW_LINKS], ids=lambda h: h.name)
@pytest.mark.parametrize("name", MODELS)
def test_it_finds_what_trying_everything_finds(name, hardware):
    model, batch = MODELS[name][0](), MODELS[name][1]()
    best = gspmd.suggest(model, (batch,), devices=4, hardware=hardware, seconds=600)[0]
    judge = Judge(model, (batch,), {}, hardware)
    everything = search.Search(judge, hardware.memory, float("inf"))
    matrices = [group for group in judge.groups if len(group.shape) > 1]
    least = min(
        everything.score(mesh, Marks(tuple((p, d) for p, d in dims if d is not None), *zero))
        for mesh in candidates.meshes(4)
        for dims in itertools.product(
            *([(g.pattern, d) for d in [None, *range(len(g.shape))]] for g in matrices)
        )
        for zero in ((False,), (True, False), (True, True))  # by_cost
    )
    assert best.seconds <= least[1] * (1 + 2 * search.MIN_GAIN)
    assert best.seconds >= best.bound


def test_less_memory_gives_other_marks():
    model, batch = Feed(128), torch.zeros(8, 128)
    free = gspmd.suggest(model, (batch,), devices=4, hardware=SLOW_LINKS, seconds=30)[0]
    bound = free.memory / 2
    tight = gspmd.suggest(model, (batch,), devices=4, hardware=SLOW_LINKS, memory=bound, seconds=30)
    assert tight[0].memory <= bound < free.memory and tight[0].seconds >= free.seconds
    excess = [proposal.memory > bound for proposal in tight]
    assert any(excess) and ["too much" in str(proposal) for proposal in tight] == excess


def test_what_sends_least_is_shown_if_it_is_little_slower():
    times, sent = (1, 1.01, 1.02, 1.03, 1.04, 1.2, 1.3), (9, 8, 7, 6, 5, 1, 0)
    tried = {
        (gspmd.Mesh(data=2**i, model=2), Marks(), 1): Numbers(seconds, 1.0, bytes, 0.0, 0.0)
        for i, (seconds, bytes) in enumerate(zip(times, sent))
    }
    shown = search.Search(None, 2.0, 0.0, tried=tried).best()
    assert [each.sent_bytes for each in shown] == [9, 8, 7, 6, 1]


def test_its_code_gives_its_numbers():
    """Pasted, the marks lead to the plan that was judged, if other weights are stored whole."""
    model, batch = Feed(), torch.zeros(8, 32)
    for found in gspmd.suggest(model, (batch,), devices=4, hardware=SLOW_PRODUCTS, seconds=30):
        wrapped = {}
        names = {
            "gspmd": gspmd,
            "model": Feed(),
            "keep": lambda *a, wrapped=wrapped, **k: wrapped.update(args=a, **k),
        }
        exec(found.code.replace("gspmd.parallelize(", "keep("), names)
        model, mesh = wrapped["args"]
        for name, parameter in model.named_parameters():
            if name not in found.marks:  # as parallelize does
                gspmd.mark_sharding(parameter, mesh, " ".join("_" * parameter.dim()))
        result = gspmd.plan(model, batch, mesh=mesh, in_specs=wrapped["in_specs"], grad=True)
        assert result.sent_bytes == pytest.approx(found.sent_bytes)
        assert result.estimate(SLOW_PRODUCTS).seconds == pytest.approx(found.seconds)


def test_few_of_like_layers_stand_for_all():
    model, batch = Deep(6), torch.zeros(8, 16)
    layers = Layers.of(model)
    assert layers.lists == {"layers": model.layers} and layers.length == 6
    with layers.shortened(2):
        assert len(model.layers) == 2
    assert len(model.layers) == 6
    best = gspmd.suggest(model, (batch,), devices=2, hardware=SLOW_PRODUCTS, seconds=30)[0]
    assert best.layers == (3, 6) and "3 of 6 layers" in str(best)
    mesh = best.mesh
    whole = gspmd.plan(
        gspmd.annotate(model, mesh, best.marks), batch, mesh=mesh, in_specs=best.in_specs, grad=True
    )
    assert best.seconds == pytest.approx(whole.estimate(SLOW_PRODUCTS).seconds, rel=0.05)


class Labelled(nn.Module):
    """As transformers' models are called: by keyword, with a large head after small layers."""

    def __init__(self, layers: int):
        super().__init__()
        self.table, self.head = nn.Embedding(512, 16), nn.Linear(16, 512)
        self.layers = nn.ModuleList(Feed(16) for _ in range(layers))

    def forward(self, tokens, labels, scale=1.0):
        x = self.table(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return scale * F.cross_entropy(self.head(x), labels)


@pytest.mark.parametrize("by_name", ["tokens labels", "labels"])
def test_arguments_by_keyword(by_name):
    tokens = torch.zeros(64, dtype=torch.long)
    call = {"tokens": tokens, "labels": tokens}
    args = () if "tokens" in by_name else tokens
    kwargs = {name: call[name] for name in by_name.split()}
    model = Labelled(5)
    for found in gspmd.suggest(model, args, devices=2, kwargs=kwargs, hardware=SLOW_LINKS):
        marked = gspmd.annotate(Labelled(5), found.mesh, found.marks)
        plan = gspmd.plan(
            marked,
            *(() if args == () else (args,)),
            **kwargs,
            mesh=found.mesh,
            in_specs=found.in_specs,
            grad=True,
        )
        report = plan.report(SLOW_LINKS, tried=False)
        assert found.sent_bytes == pytest.approx(plan.sent_bytes, rel=0.01)
        assert found.memory == pytest.approx(report.memory.peak + report.memory.optimizer, rel=0.05)


def test_marks_of_the_model_do_not_count():
    """Neither those on a mesh, nor those by names, which no layout binds."""
    best = []
    for marks in ({}, {"up.weight": "hidden _"}):
        model = gspmd.annotate(Feed(), marks)
        if not marks:
            gspmd.annotate(model, gspmd.Mesh(other=3), {"up.weight": "other _"})
        best.append(gspmd.suggest(model, (torch.zeros(8, 32),), devices=2, seconds=30)[0])
    assert best[0] == best[1]


def test_what_it_does_not_take():
    with pytest.raises(gspmd.ShardingError, match="is no size"):
        gspmd.suggest(Feed(), (torch.zeros(8, 32),), devices=2, memory="much")


class Wide(nn.Module):
    """Layers whose activations are large beside their weights."""

    def __init__(self, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Tanh())
            for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def plan_of(model: nn.Module, found: Proposal, batch: torch.Tensor) -> tuple[float, float]:
    """Run the code of a proposal; return seconds and memory of a device that the plan has."""
    steps: list[tuple[int, float, float]] = []
    names: dict[str, Any] = {"gspmd": gspmd, "model": model, "batch": (batch,)}

    def wrapped(model, mesh, **options):
        def step(rows):
            like = [old for old in steps if old[0] == len(rows)]
            if not like:
                plan = gspmd.plan(model, rows, mesh=mesh, grad=True, **options)
                memory = plan.report(SLOW_LINKS, tried=False).memory
                seconds = plan.estimate(SLOW_LINKS).seconds
                like = [(len(rows), seconds, memory.peak + memory.optimizer)]
            steps.append(like[0])
            return torch.zeros(1, requires_grad=True)

        return step

    names["wrapped"] = wrapped
    exec(found.code.replace("gspmd.parallelize(", "wrapped("), names)
    if not steps:
        names["model"](batch)
    return sum(step[1] for step in steps), max(step[2] for step in steps)


@pytest.mark.parametrize("layers", [2, 4], ids=["whole", "extrapolated"])
def test_as_many_layers_are_recomputed_as_memory_asks(layers):
    """Against every number of layers, each planned. The code that is printed keeps to memory."""
    batch = torch.zeros(4096, 16)
    judge = Judge(Wide(layers), (batch,), {}, SLOW_LINKS)
    mesh, marks = gspmd.Mesh(data=2, model=1), Marks()
    known = [
        judge.numbers(mesh, marks, Savings(recomputed=(("", n),) if n else ()))
        for n in range(layers + 1)
    ]
    truth = []
    for number in range(layers + 1):
        model = Wide(layers)
        with Layers.of(model).recomputed((("", number),)):
            plan = gspmd.plan(model, batch, mesh=mesh, in_specs="data _", grad=True)
        memory = plan.report(SLOW_LINKS, tried=False).memory
        truth.append((memory.peak + memory.optimizer, plan.estimate(SLOW_LINKS).seconds))
    for (memory, seconds), number in zip(truth, known):
        assert memory <= number.memory * 1.001 and number.seconds >= seconds * 0.99
    for limit in (known[1].memory, (known[1].memory + known[2].memory) / 2):
        least = min(seconds for memory, seconds in truth if memory <= limit)
        found = search.Search(judge, limit, float("inf"))._plan(mesh, marks, 1)
        assert found.memory <= limit and found.seconds <= least * 1.1
    assert plan_of(Wide(layers), found, batch)[1] <= limit


def test_a_batch_is_divided_where_nothing_fits():
    model, batch = Wide(2), torch.zeros(4096, 16)
    options = {"devices": 1, "hardware": SLOW_LINKS, "seconds": 600}
    free = gspmd.suggest(model, (batch,), **options)[0]
    assert free.largest_batch and free.largest_batch >= len(batch) and free.savings == Savings()
    limit = free.memory / 5
    found = gspmd.suggest(model, (batch,), memory=limit, **options)[0]
    assert found.memory <= limit and found.savings.microbatches > 1
    seconds, memory = plan_of(Wide(2), found, batch)
    assert found.savings.calls == 1 and "microbatches=" in found.code
    assert memory <= limit and seconds == pytest.approx(found.seconds, rel=0.01)


def test_the_largest_batch_fits_and_no_larger_one():
    judge = Judge(Wide(1), (torch.zeros(64, 16),), {}, SLOW_LINKS)
    mesh, marks, savings = gspmd.Mesh(data=2, model=1), Marks(), Savings()
    limit = 20 * judge.numbers(mesh, marks, savings).memory
    rows = judge.most_rows(mesh, marks, savings, limit)
    memory = [judge.numbers(mesh, marks, savings, n).memory for n in (rows, rows + rows // 16)]
    assert memory[0] <= limit < memory[1]


def test_like_parameters_have_one_shape():
    shapes = {"a.0.0.weight": (2, 4), "a.0.1.weight": (4, 2)}
    shapes |= {"a.1.0.weight": (2, 4), "a.1.1.weight": (4, 2), "b.0.weight": (3,)}
    globs = patterns_of(shapes)
    assert globs["a.1.0.weight"] == "a.*.0.weight" and globs["a.1.1.weight"] == "a.*.1.weight"
    assert globs["b.0.weight"] == "b.*.weight"


class Costly(nn.Module):
    """Of a layer, one part takes time and the other one memory."""

    def __init__(self):
        super().__init__()
        self.product, self.chain = nn.Linear(64, 64), Chain()

    def forward(self, x):
        return x + self.chain(self.product(x))


class Chain(nn.Module):
    def forward(self, x):
        for _ in range(3):
            x = x.sin().exp()
        return x


class Costlies(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Costly() for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.skipif(not has_solver(), reason="needs highspy: pip install highspy")
def test_what_is_recomputed_is_the_best_of_all_choices():
    """Of nothing, a layer, and each part, for each layer."""
    judge = Judge(Costlies(), (torch.zeros(2048, 64),), {}, SLOW_PRODUCTS)
    mesh, marks = gspmd.Mesh(data=1, model=1), Marks()
    paths = [None, "", "product", "chain"]
    uniform = {
        path: judge.numbers(mesh, marks, Savings(recomputed=() if path is None else ((path, 5),)))
        for path in paths
    }
    smallest, largest = min(n.memory for n in uniform.values()), uniform[None].memory
    for share in (0.8, 0.5, 0.1):
        limit = smallest + share * (largest - smallest)
        least = min(
            sum(uniform[path].seconds for path in each) / 5
            for each in itertools.combinations_with_replacement(paths, 5)
            if sum(uniform[path].memory for path in each) / 5 <= limit
        )
        solved = judge.best_recomputed(mesh, marks, Savings(), limit)
        assert solved
        savings, bound = solved
        found = judge.numbers(mesh, marks, savings)
        assert found.memory <= limit and found.seconds == pytest.approx(least)
        assert bound <= found.seconds * 1.0001
        assert any(path == "chain" for path, _ in savings.recomputed)
        model = Costlies()
        with Layers.of(model).recomputed(savings.recomputed):
            plan = gspmd.plan(model, torch.zeros(2048, 64), mesh=mesh, grad=True)
        memory = plan.report(SLOW_PRODUCTS, tried=False).memory
        assert memory.peak + memory.optimizer <= limit * 1.001


def test_the_code_of_layers():
    layers = Layers.of(Costlies())
    assert layers.code((("", 5),)) == "model.layers"
    code = layers.code((("", 1), ("chain", 3)))
    assert code == "[*model.layers[:1], *(each.chain for each in model.layers[1:4])]"


def test_marks_of_arguments_and_of_stacks_of_matrices():
    mesh, image, stack = gspmd.Mesh(data=2, model=4), (8, 3, 64, 66), Group("w", (8, 6, 4), 1)
    rows = Marks().with_arguments((0,), 2)
    assert str(rows.argument_spec(0, image, mesh)) == "data _ model _"
    assert str(rows.argument_spec(1, image, mesh)) == "data _ _ _"
    assert str(Marks().with_arguments((0,), 0).argument_spec(0, image, mesh)) == "data+model _ _ _"
    assert str(rows.with_arguments((0,), 3).argument_spec(0, image, mesh)) == "data _ _ _"
    experts = Marks(stacked=frozenset(["w"]))
    assert str(experts.spec(stack, mesh)) == "data _ _"
    assert str(replace(experts, zero=True).with_dims(["w"], 2).spec(stack, mesh)) == "data _ model"
    assert (
        experts.on(gspmd.Mesh(data=1, model=4)) == Marks() == rows.on(gspmd.Mesh(data=4, model=1))
    )


def test_two_layers_that_are_less_than_one_are_not_extrapolated():
    """A plan of one layer may be a worse one than that of two."""
    judge = Judge(Deep(6), (torch.zeros(8, 16),), {}, SLOW_PRODUCTS)
    mesh, one = gspmd.Mesh(data=1, model=1), Numbers(2.0, 10.0, 4.0, 1.0, 2.0)
    assert judge._whole((one, Numbers(3.0, 11.0, 5.0, 2.0, 3.0)), mesh).seconds == 7.0
    assert judge._whole((one, Numbers(1.5, 11.0, 5.0, 2.0, 3.0)), mesh).seconds == 4.5
    assert judge._whole((one, Numbers(3.0, 9.0, 5.0, 2.0, 3.0)), mesh).memory == 27.0


class Fixed(nn.Module):
    """A model of eight rows."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16)])
        self.register_buffer("place", torch.zeros(8, 16))

    def forward(self, x):
        return (self.layers[0](x) + self.place).square().mean()


def test_a_model_that_takes_one_batch_alone():
    for memory in (None, 1500):
        options = {"devices": 1, "memory": memory, "seconds": 600}
        found = gspmd.suggest(Fixed(), (torch.zeros(8, 16),), **options)[0]
        assert found.savings.microbatches == 1 and found.largest_batch in (8, None)


class Pair(nn.Module):
    """A layer that returns its value and a table, as transformers' may."""

    def __init__(self):
        super().__init__()
        self.norm, self.feed = nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16))

    def forward(self, x):
        return x + self.feed(self.norm(x)), {"longest": x.argmax(1)}


class Pairs(nn.Module):
    def __init__(self, layers: int = 6):
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x, _ = layer(x)
        return x.square().mean()


def test_marks_of_layer_outputs():
    """Judged as annotate applies them, and without marks nothing of the capture is left."""
    model, batch = Pairs(), torch.zeros(8, 32, 16)
    judge = Judge(model, (batch,), {}, SLOW_LINKS)
    whole, every = (globs for _, globs in judge.output_groups())
    assert whole == ("layers.*",)
    assert set(every) == {"layers.*", "layers.*.norm", "layers.*.feed"}
    assert not any(module._forward_hooks for module in model.modules())
    mesh = gspmd.Mesh(data=2, model=4)
    _, alone, with_outputs = candidates.starts(judge, mesh)
    assert alone.model == (("layers.*.feed.0.weight", 0), ("layers.*.feed.1.weight", 1))
    kinds = {}
    for marks in (Marks(), alone, with_outputs):
        judge.first = 2
        numbers = judge.numbers(mesh, marks, Savings())
        layouts = judge.marks(mesh, marks, Savings())
        if marks.outputs:
            assert layouts["layers.*"] == layouts["layers.*.norm"] == "data model _"
        plan = gspmd.plan(
            gspmd.annotate(Pairs(), mesh, layouts), batch, mesh=mesh, in_specs="data _ _", grad=True
        )
        assert numbers.sent_bytes == pytest.approx(plan.sent_bytes, rel=1e-6)
        assert numbers.seconds == pytest.approx(plan.estimate(SLOW_LINKS).seconds, rel=0.02)
        kinds[marks] = {c.kind for c in plan.collectives}
    assert "reduce_scatter" in kinds[with_outputs] and "reduce_scatter" not in kinds[alone]


def test_a_start_has_what_a_descent_finds():
    """From tensor and sequence parallelism it gets at least as far as from no marks."""
    model, batch = Pairs(), torch.zeros(8, 256, 16)
    judge = Judge(model, (batch,), {}, SLOW_LINKS)
    mesh = gspmd.Mesh(data=1, model=4)
    searched = search.Search(judge, 1e9, float("inf"))
    start = searched._best_start(mesh, candidates.starts(judge, mesh))
    found = searched._descend(mesh, start)
    from_nothing = searched._descend(mesh, Marks())
    assert searched.score(mesh, found) <= searched.score(mesh, from_nothing)


class Mixture(nn.Module):
    """A layer whose tokens go to one of eight experts, with a square matrix that is no expert."""

    def __init__(self):
        super().__init__()
        self.router, self.mix = nn.Linear(16, 8), nn.Parameter(torch.zeros(4, 16, 4))
        self.up, self.down = (nn.Parameter(torch.zeros(8, *s)) for s in ((16, 32), (32, 16)))

    def forward(self, x):
        y = torch.einsum("bsd,hdk->bshk", x, self.mix).flatten(2)
        weights, chosen = self.router(y).softmax(-1).topk(1)
        rows = moe.dispatch(y, chosen, 8, shards=8, capacity=2.0)
        up = moe.grouped_mm(rows.rows, self.up, rows.ends).relu()
        return x + moe.combine(moe.grouped_mm(up, self.down, rows.ends), rows, weights)


class Dense(nn.Module):
    """The same by products with a row for each expert, as GShard writes them."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 8)
        self.up, self.down = (nn.Parameter(torch.zeros(8, *s)) for s in ((16, 32), (32, 16)))

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        rows = torch.einsum("bse,bsd->ebsd", shares, x)
        up = torch.einsum("ebsd,edh->ebsh", rows, self.up).relu()
        return x + torch.einsum("ebsh,ehd->bsd", up, self.down)


@pytest.mark.parametrize("layer", [Mixture, Dense])
def test_experts_have_an_axis(layer):
    """Stacks are known by their products; on a mesh with the axis they are divided along it."""
    model = nn.Sequential(*(layer() for _ in range(4)))
    judge = Judge(model, (torch.zeros(16, 8, 16),), {}, SLOW_LINKS)
    assert judge.stacks == {"*.up": 8, "*.down": 8}
    meshes = list(candidates.meshes(16, judge.stacks.values()))
    assert gspmd.Mesh(data=2, expert=8, model=1) in meshes
    assert gspmd.Mesh(data=4, expert=2, model=2) in meshes
    assert list(candidates.meshes(16)) == [mesh for mesh in meshes if "expert" not in mesh.names]
    mesh = gspmd.Mesh(data=2, expert=4, model=2)
    groups = {group.pattern: group for group in judge.groups}
    start = candidates.starts(judge, mesh)[0]
    assert str(start.spec(groups["*.up"], mesh)) == "expert _ _"
    zero = replace(start, zero=True)
    assert str(zero.spec(groups["*.up"], mesh)) == "expert _ data:p1"
    assert str(zero.spec(groups["*.router.weight"], mesh)) == "_ data+expert:p1"
    assert judge.call_specs(mesh, start, 16) == ("data+expert _ _",)


def test_a_batch_is_divided_by_all_its_divisors():
    assert candidates.divisions(36) == [2, 3, 4, 6, 9, 12, 18, 36]
    assert candidates.divisions(8) == [2, 4, 8] and candidates.divisions(0) == []


def test_only_batches_that_are_tried_are_captured():
    """Eight devices divide no microbatch of eight rows, however little memory there is."""
    judge = Judge(Feed(), (torch.zeros(8, 32),), {}, SLOW_LINKS)
    mesh = gspmd.Mesh(data=8, model=1)
    kept = judge.numbers(mesh, Marks(), Savings())
    limit = kept.memory - kept.saved / 2
    assert search.Search(judge, limit, float("inf"))._plan(mesh, Marks(), 1).memory > limit
    assert {rows for _, (_, rows, _) in judge.captures} == {8}


class _Logits(Wide):
    """A model whose loss is outside of it."""

    def forward(self, x):
        return super().forward(x) * torch.ones(16)


def test_microbatches_are_calls_where_the_model_returns_no_loss():
    model, batch = _Logits(2), torch.zeros(4096, 16)
    options = {"devices": 1, "hardware": SLOW_LINKS, "seconds": 600}
    free = gspmd.suggest(model, (batch,), **options)[0]
    found = gspmd.suggest(model, (batch,), memory=free.memory / 5, **options)[0]
    assert found.savings.calls > 1 and ".chunk(" in found.code
    _, memory = plan_of(model, found, batch)
    assert memory + 4 * sum(p.numel() for p in model.parameters()) <= free.memory / 5


class Fused(nn.Module):
    """Attention with one weight for queries, keys and values."""

    def __init__(self, width: int = 96):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, 2, -1)).unbind(2)
        seen = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return x + self.out(seen.transpose(1, 2).flatten(2))


def test_marks_of_fused_weights_can_be_written():
    # A plan stores such a weight in the parts that forward cuts it into, which no mark names.
    batch, mesh = torch.zeros(4, 64, 96), gspmd.Mesh(data=4, model=2)
    judge = Judge(nn.Sequential(Fused(), Fused()), (batch,), {}, SLOW_LINKS)
    fused = next(g.pattern for g in judge.groups if g.pattern.endswith("qkv.weight"))
    for marks in (Marks(((fused, 0),)), Marks(((fused, 0),), zero=True)):
        numbers = judge.numbers(mesh, marks, Savings())
        layouts = judge.marks(mesh, marks, Savings())
        assert "model" in layouts[fused]
        model = gspmd.annotate(nn.Sequential(Fused(), Fused()), mesh, layouts)
        plan = gspmd.plan(model, batch, mesh=mesh, in_specs="data _ _", out_specs="same", grad=True)
        if not marks.zero:  # with it, this plan sends 3 % more than the search expects
            assert numbers.sent_bytes == pytest.approx(plan.sent_bytes, rel=1e-6)


class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(self.up(x[x[:, 0] > 0]).relu())


def test_outputs_of_as_many_rows_as_values_say():
    found = gspmd.suggest(nn.Sequential(Chosen()), torch.randn(8, 16), devices=2, seconds=1)
    assert found


class Counting(Deep):
    def forward(self, x):
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]).relu())
        if len(states) != 7:
            raise ValueError(f"{len(states)} states")
        return sum(s.sum() for s in states)


def test_a_model_that_counts_its_layers():
    found = gspmd.suggest(Counting(), torch.zeros(8, 16), devices=2, seconds=1)
    assert found
