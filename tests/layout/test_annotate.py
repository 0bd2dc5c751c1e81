"""mark_sharding and annotate."""

import torch
from helpers import message
from torch import nn

import torchgspmd as gspmd
from torchgspmd.layout.mark import recorded_mark

MESH = gspmd.Mesh(data=2, model=4)
WHERE = "\n  where test_annotate.py:N"


def mark_of(tensor):
    mark = recorded_mark(tensor)
    return None if mark is None else str(mark[1])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return self.down(self.up(x).relu()) * self.scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Several(nn.Module):
    def forward(self, x):
        return {"y": x * 2, "index": x.argmax(-1), "flat": x.sum(), "none": None}


def test_parameter_remembers_its_mark():
    weight = nn.Parameter(torch.zeros(8, 4))
    assert gspmd.mark_sharding(weight, MESH, ("model", None)) is weight
    mesh, spec, source = recorded_mark(weight)
    assert (mesh, str(spec)) == (MESH, "model _") and source.rsplit(":")[0].endswith(
        "test_annotate.py"
    )


def test_later_mark_wins():
    weight = nn.Parameter(torch.zeros(8, 4))
    gspmd.mark_sharding(weight, MESH, "model _")
    gspmd.mark_sharding(weight, MESH, "_ model")
    assert mark_of(weight) == "_ model"


def test_value_is_returned_unchanged_outside_of_a_capture():
    x = torch.randn(4, 8, requires_grad=True)
    y = x * 2
    marked = gspmd.mark_sharding(y, MESH, "data model")
    assert marked is y and mark_of(y) is None
    marked.sum().backward()
    assert torch.equal(x.grad, torch.full((4, 8), 2.0))


def test_mark_in_a_capture_is_a_node_and_marks_the_gradient():
    class Marked(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, 8))

        def forward(self, x):
            return gspmd.mark_sharding(x * self.w, MESH, "data model").exp().sum()

    plan = gspmd.plan(Marked(), torch.zeros(4, 8), mesh=MESH, grad=True)
    marks = [
        (n.name, str(n.meta["spec"]), n.meta["backward"])
        for n in plan.sharded.nodes
        if "mark" in n.meta
    ]
    assert marks == [
        ("mark_sharding", "data model", False),
        ("mark_sharding_1", "data model", True),
    ]


def test_same_numbers_marked_or_not():
    def f(x):
        return gspmd.mark_sharding(x.sin(), MESH, "data ?").cos()

    x = torch.randn(4, 8)
    assert torch.equal(f(x), x.sin().cos())
    assert torch.equal(gspmd.plan(f, x, mesh=MESH).simulate(x), x.sin().cos())


def test_annotate_parameters_buffers_and_modules():
    net = Net()
    assert (
        gspmd.annotate(
            net,
            MESH,
            {"blocks.*.up.weight": "model _", "blocks.0.scale": "model", "blocks.*": "data _"},
        )
        is net
    )
    marks = {
        name: mark_of(t)
        for name, t in (*net.named_parameters(), *net.named_buffers())
        if mark_of(t)
    }
    assert marks == {
        "blocks.0.up.weight": "model _",
        "blocks.1.up.weight": "model _",
        "blocks.0.scale": "model",
    }
    plan = gspmd.plan(net, torch.zeros(8, 4), mesh=MESH)
    assert [str(n.meta["spec"]) for n in plan.sharded.nodes if "mark" in n.meta] == [
        "data _",
        "data _",
    ]


def test_star_matches_within_a_part_two_stars_across():
    one, two = Net(), Net()
    gspmd.annotate(one, MESH, {"*.weight": "_ _"})
    gspmd.annotate(two, MESH, {"**.weight": "_ _"})
    assert [n for n, p in one.named_parameters() if mark_of(p)] == ["head.weight"]
    assert [n for n, p in two.named_parameters() if mark_of(p)] == [
        "blocks.0.up.weight",
        "blocks.0.down.weight",
        "blocks.1.up.weight",
        "blocks.1.down.weight",
        "head.weight",
    ]


def test_letters_in_brackets_and_a_question_mark():
    for pattern, names in {
        "blocks.[0].up.weight": ["blocks.0.up.weight"],
        "blocks.[!0].up.weight": ["blocks.1.up.weight"],
        "blocks.?.up.weight": ["blocks.0.up.weight", "blocks.1.up.weight"],
    }.items():
        net = Net()
        gspmd.annotate(net, MESH, {pattern: "_ _"})
        assert [n for n, p in net.named_parameters() if mark_of(p)] == names


def test_the_dot_of_a_glob_is_literal():
    assert message(lambda: gspmd.annotate(Net(), MESH, {"headxweight": "_ _"})) == (
        f"'headxweight' matches no parameter, buffer or module{WHERE}\n"
        "  fix   did you mean 'head.weight'?"
    )


def test_later_key_wins():
    net = Net()
    gspmd.annotate(net, MESH, {"**.up.weight": "model _", "blocks.1.up.weight": "_ model"})
    assert [mark_of(net.blocks[i].up.weight) for i in (0, 1)] == ["model _", "_ model"]


def test_tied_parameter_is_found_under_either_name():
    net = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    net["b"].weight = net["a"].weight
    gspmd.annotate(net, MESH, {"b.weight": "model _"})
    assert mark_of(net["a"].weight) == "model _"


def test_floating_outputs_of_the_spec_s_rank_are_marked():
    net = nn.Sequential(Several())
    gspmd.annotate(net, MESH, {"0": "data _"})
    out = gspmd.plan(net, torch.zeros(8, 4), mesh=MESH, out_specs="same")
    assert [str(s) for s in out.out_specs] == ["data _", "data", ""]
    assert len([n for n in out.sharded.nodes if "mark" in n.meta]) == 1
    assert net(torch.ones(8, 4))["none"] is None


ERRORS = [
    (
        lambda: gspmd.mark_sharding(torch.zeros(4, 8), MESH, "data _ _"),
        f"spec 'data _ _' has 3 entries, but the tensor has 2 dimensions [4, 8]{WHERE}\n"
        "  fix   write one entry per dimension, such as 'data _'",
    ),
    (
        lambda: gspmd.mark_sharding(torch.zeros(4, 8), MESH, ("data", "data")),
        f"'data' occurs twice in spec 'data data'{WHERE}\n"
        "  why   an axis shards at most one dimension of a tensor\n"
        "  fix   remove one of the two",
    ),
    (
        lambda: gspmd.mark_sharding(torch.zeros(4, 8), MESH, "data modl"),
        f"mesh data=2,model=4 has no axis 'modl'; did you mean 'model'?{WHERE}",
    ),
    (
        lambda: gspmd.mark_sharding(torch.zeros(4, 8), MESH, "_ _ sum@data"),
        f"a mark cannot ask for a pending reduction ('_ _ sum@data'){WHERE}",
    ),
    (
        lambda: gspmd.mark_sharding(torch.zeros(4, 8), "data=2", "_ _"),
        f"a mesh is a torchgspmd.Mesh or torch's DeviceMesh, not str{WHERE}\n"
        "  fix   pass a mesh such as Mesh(data=2, model=4)",
    ),
    (
        lambda: gspmd.annotate(Net(), MESH, {"blocks.*.up.weigth": "model _"}),
        f"'blocks.*.up.weigth' matches no parameter, buffer or module{WHERE}\n"
        "  fix   did you mean 'blocks.1.up.weight'?",
    ),
    (
        lambda: gspmd.annotate(Net(), MESH, {"**.pu.weight": "model _"}),
        f"'**.pu.weight' matches no parameter, buffer or module{WHERE}\n"
        "  fix   did you mean '**.up.weight'?",
    ),
    (
        lambda: gspmd.annotate(Net(), MESH, {"*.up.weight": "model _"}),
        f"'*.up.weight' matches no parameter, buffer or module{WHERE}\n"
        "  fix   write '**.up.weight': * matches within one part of a name, ** across parts",
    ),
    (
        lambda: gspmd.annotate(Net(), MESH, {r"blocks\.\d+\.up.*": "model _"}),
        f"'blocks\\.\\d+\\.up.*' matches no parameter, buffer or module{WHERE}\n"
        "  fix   write a glob, not a regular expression, of which this one matches "
        "'blocks.0.up.weight': "
        "* matches within one part of a name, ** across parts",
    ),
    (
        lambda: gspmd.annotate(
            nn.ModuleList(nn.Linear(1, 1) for _ in range(20)), MESH, {"embedding": "model _"}
        ),
        f"'embedding' matches no parameter, buffer or module{WHERE}\n"
        "  fix   use one of "
        + ", ".join(f"'{i}.{n}'" for i in range(10) for n in ("weight", "bias"))
        + " and 40 more",
    ),
    (
        lambda: gspmd.annotate(Net(), MESH, {"head.weight": "model"}),
        "'head.weight' gives 'model' to 'head.weight', which has 2 dimensions [3, 4]"
        f"{WHERE}\n  fix   write 'head.weight': 'model _'",
    ),
]


def test_errors():
    assert [message(action) for action, _ in ERRORS] == [text for _, text in ERRORS]


def test_error_in_a_capture_is_the_same():
    assert message(
        lambda: gspmd.plan(
            lambda x: gspmd.mark_sharding(x + 1, MESH, "modl _"), torch.zeros(4, 8), mesh=MESH
        )
    ) == (f"mesh data=2,model=4 has no axis 'modl'; did you mean 'model'?{WHERE}")
