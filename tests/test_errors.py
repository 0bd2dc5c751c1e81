"""What a user can do wrong with a plan, and the whole message; and how the user's line is found."""

import random

import numpy
import pytest
import torch
from helpers import assert_same, message
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardingError, plan
from torchgspmd.compiler.options import NAMED, rows_for
from torchgspmd.errors import did_you_mean, user_line

MESH = Mesh(data=2, model=4)
X = torch.zeros(4, 8)
WHERE = "\n  where test_errors.py:N"
ONE = "\n  fix   write one entry per dimension, such as "
FORMS = "\n  fix   write specs as strings, in the containers of the value"


def linear_on(mesh, spec):
    module = nn.Linear(8, 4)
    gspmd.mark_sharding(module.weight, mesh, spec)
    return module


ERRORS = {
    "mark of an unknown axis": (
        lambda: plan(lambda x: gspmd.mark_sharding(x + 1, MESH, "modle _"), X, mesh=MESH),
        f"mesh data=2,model=4 has no axis 'modle'; did you mean 'model'?{WHERE}",
    ),
    "mark of a wrong rank": (
        lambda: plan(lambda x: gspmd.mark_sharding(x + 1, MESH, "model"), X, mesh=MESH),
        f"spec 'model' has 1 entries, but the tensor has 2 dimensions [4, 8]{WHERE}{ONE}'model _'",
    ),
    "axis twice": (
        lambda: plan(lambda x: gspmd.mark_sharding(x + 1, MESH, "model model"), X, mesh=MESH),
        f"'model' occurs twice in spec 'model model'{WHERE}\n"
        "  why   an axis shards at most one dimension of a tensor\n"
        "  fix   remove one of the two",
    ),
    "value marked on another mesh": (
        lambda: plan(lambda x: gspmd.mark_sharding(x + 1, Mesh(q=2), "q _"), X, mesh=MESH),
        f"a value is marked on mesh q=2, but the program runs on mesh data=2,model=4{WHERE}\n"
        "  fix   use one Mesh for all marks of a program",
    ),
    "parameter marked on another mesh": (
        lambda: plan(linear_on(Mesh(model=2), "model _"), X, mesh=MESH),
        "parameter 'weight' is marked on mesh model=2, but the program runs on mesh "
        f"data=2,model=4{WHERE}\n"
        "  fix   use one Mesh for all marks of a program",
    ),
    "in_specs of an unknown axis": (
        lambda: plan(torch.sin, X, mesh=MESH, in_specs=("dta _",)),
        f"mesh data=2,model=4 has no axis 'dta'; did you mean 'data'?{WHERE}",
    ),
    "in_specs of a wrong rank": (
        lambda: plan(torch.sin, X, mesh=MESH, in_specs=("data _ _",)),
        f"spec 'data _ _' has 3 entries, but args[0] has 2 dimensions [4, 8]{WHERE}{ONE}'data _'",
    ),
    "in_specs of a wrong rank, deep": (
        lambda: plan(
            lambda d: d["a"][1], {"a": (X, X)}, mesh=MESH, in_specs=({"a": (None, "data")},)
        ),
        f"spec 'data' has 1 entries, but args[0]['a'][1] has 2 dimensions [4, 8]{WHERE}"
        f"{ONE}'data _'",
    ),
    "one spec for two arguments": (
        lambda: plan(torch.add, X, X, mesh=MESH, in_specs="data _"),
        f"one spec, 'data _', is given for 2 arguments{WHERE}\n"
        "  fix   give a tuple with one spec for each",
    ),
    "an option that is in_specs": (
        lambda: plan(torch.sin, X, mesh=MESH, in_spec="data _"),
        f"plan has no option 'in_spec', and the function no such argument{WHERE}\n"
        "  fix   did you mean 'in_specs'?",
    ),
    "an option of parallelize that is out_specs": (
        lambda: gspmd.parallelize(nn.Linear(8, 8), MESH, outspec="data _"),
        f"parallelize has no option 'outspec'{WHERE}\n  fix   did you mean 'out_specs'?",
    ),
    "a spec in tuple form for one argument": (
        lambda: plan(lambda x: x.sin(), X, mesh=MESH, in_specs=("data", None)),
        f"args has 1 entries, but 2 specs are given{WHERE}\n"
        "  fix   a tuple has one spec an argument; write in_specs='data _' for one argument",
    ),
    "placements in in_specs": (
        lambda: plan(lambda x: x.sin(), X, mesh=MESH, in_specs=[Shard(1), Shard(0)]),
        "[Shard(dim=1), Shard(dim=0)] are placements of DTensor, one for each axis of a mesh"
        f"{WHERE}"
        "\n  why   a spec has one word for each dimension of the tensor: the axes that shard it\n"
        "  fix   write 'model data', and '_' for each further dimension, in place of "
        "[Shard(dim=1), Shard(dim=0)]",
    ),
    "placements in a mark": (
        lambda: linear_on(MESH, [Shard(0), Replicate()]),
        f"[Shard(dim=0), Replicate()] are placements of DTensor, one for each axis of a mesh{WHERE}"
        "\n  why   a spec has one word for each dimension of the tensor: the axes that shard it\n"
        "  fix   write 'data _' in place of [Shard(dim=0), Replicate()]",
    ),
    "a NumPy array as an argument": (
        lambda: plan(lambda x: torch.as_tensor(x) + 1, numpy.zeros((4, 8)), mesh=MESH),
        f"argument 'x' is a NumPy array of shape [4, 8]{WHERE}\n"
        "  why   its values would become constants of the program\n"
        "  fix   pass torch.from_numpy(x)",
    ),
    "a plan's file that is missing": (
        lambda: gspmd.Plan.load("no/such.plan"),
        f"there is no file no/such.plan{WHERE}\n"
        "  fix   write it by plan.save(path), or correct the path",
    ),
    "too few specs": (
        lambda: plan(torch.add, X, X, mesh=MESH, in_specs=("data _",)),
        f"args has 2 entries, but 1 specs are given{WHERE}\n"
        "  fix   give one spec for each, None where it is open; a spec itself is a "
        "string here, a tuple is a container",
    ),
    "a spec in tuple form": (
        lambda: plan(torch.sin, X, mesh=MESH, in_specs=(("data", None),)),
        f"the specs given for args[0] are a tuple, where the value is a Tensor{WHERE}{FORMS}",
    ),
    "a number as a spec": (
        lambda: plan(torch.sin, X, mesh=MESH, in_specs=(3,)),
        f"the specs given for args[0] are a int, where the value is a Tensor{WHERE}{FORMS}",
    ),
    "a number as in_specs": (
        lambda: plan(torch.sin, X, mesh=MESH, in_specs=3),
        f"the specs given for args are a int, where the value is a tuple{WHERE}{FORMS}",
    ),
    "unknown keyword in in_specs": (
        lambda: plan(lambda x, y: x + y, X, y=X, mesh=MESH, in_specs={"z": "data _"}),
        f"arguments has no entry 'z'; it has 'x', 'y'{WHERE}",
    ),
    "unknown key in in_specs": (
        lambda: plan(lambda d: d["a"], {"a": X}, mesh=MESH, in_specs=({"b": "data _"},)),
        f"args[0] has no entry 'b'; it has 'a'{WHERE}",
    ),
    "pending in in_specs": (
        lambda: plan(torch.sin, X, mesh=MESH, in_specs="data _ sum@model"),
        f"spec 'data _ sum@model' for args[0] asks for a pending reduction{WHERE}",
    ),
    "pending in out_specs": (
        lambda: plan(torch.sin, X, mesh=MESH, out_specs="data _ sum@model"),
        f"spec 'data _ sum@model' for the result asks for a pending reduction{WHERE}",
    ),
    "out_specs of a wrong rank": (
        lambda: plan(torch.sin, X, mesh=MESH, out_specs="data model _"),
        f"spec 'data model _' has 3 entries, but the result has 2 dimensions [4, 8]{WHERE}"
        f"{ONE}'data model'",
    ),
    "out_specs of an unknown axis": (
        lambda: plan(torch.sin, X, mesh=MESH, out_specs="data modl"),
        f"mesh data=2,model=4 has no axis 'modl'; did you mean 'model'?{WHERE}",
    ),
    "out_specs of another number": (
        lambda: plan(lambda x: (x, x + 1), X, mesh=MESH, out_specs=("data _",)),
        f"the result has 2 entries, but 1 specs are given{WHERE}\n"
        "  fix   give one spec for each, None where it is open; a spec itself is a "
        "string here, a tuple is a container",
    ),
    "grad of a function": (
        lambda: plan(torch.sin, X, mesh=MESH, grad=True),
        f"plan(grad=True) takes a module{WHERE}\n"
        "  fix   call torch.autograd.grad inside of the function",
    ),
    "simulate with another number of arguments": (
        lambda: plan(torch.sin, X, mesh=MESH).simulate(X, X),
        f"the arguments have another structure than those that the plan was made for{WHERE}\n"
        "  fix   call simulate as the function itself was called in plan()",
    ),
    "simulate with another structure": (
        lambda: plan(torch.sin, X, mesh=MESH).simulate([X]),
        f"the arguments have another structure than those that the plan was made for{WHERE}\n"
        "  fix   call simulate as the function itself was called in plan()",
    ),
    "simulate with a keyword for a position": (
        lambda: plan(torch.sin, X, mesh=MESH).simulate(input=X),
        f"the arguments have another structure than those that the plan was made for{WHERE}\n"
        "  fix   call simulate as the function itself was called in plan()",
    ),
    "simulate with another shape": (
        lambda: plan(lambda x: x.sin(), X, mesh=MESH).simulate(torch.zeros(3, 8)),
        f"argument 'x' is f32[3, 8], the plan was made for f32[4, 8]{WHERE}\n"
        "  fix   make a plan for these shapes",
    ),
    "simulate with another type": (
        lambda: plan(lambda x: x.sin(), X, mesh=MESH).simulate(X.double()),
        f"argument 'x' is f64[4, 8], the plan was made for f32[4, 8]{WHERE}\n"
        "  fix   make a plan for these shapes",
    ),
    "an unknown constant of the cost model": (
        lambda: plan(lambda x: x.sin(), X, mesh=MESH, advanced={"costs": {"flops_per_bite": 20}}),
        f"costs has no constant 'flops_per_bite'{WHERE}\n  fix   did you mean 'flops_per_byte'?",
    ),
    "a constant of the cost model that divides": (
        lambda: plan(lambda x: x.sin(), X, mesh=MESH, advanced={"costs": {"flops_per_byte": 0}}),
        f"costs has flops_per_byte=0{WHERE}\n  fix   give a number above 0",
    ),
    "explain an unknown value": (
        lambda: plan(lambda x: x.sin(), X, mesh=MESH).explain("sn"),
        f"the plan has no value 'sn'{WHERE}\n  fix   did you mean 'sin'?",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_message(name):
    action, text = ERRORS[name]
    assert message(action) == text


def test_mesh_that_is_none():
    for mesh in ("data=2", None, 2):
        for use in (
            lambda mesh: plan(torch.sin, X, mesh=mesh),
            lambda mesh: gspmd.mark_sharding(X, mesh, "_ _"),
            lambda mesh: gspmd.parallelize(nn.Linear(2, 2), mesh),
            lambda mesh: gspmd.shard_batch(X, mesh, "_ _"),
        ):
            text = message(lambda use=use, mesh=mesh: use(mesh))
            assert text.startswith("a mesh is a torchgspmd.Mesh or torch's DeviceMesh, not")


def test_parts_of_a_message():
    error = ShardingError("what", where="a.py:1", why="because", fix="do")
    assert str(error) == "what\n  where a.py:1\n  why   because\n  fix   do"
    assert (error.what, error.where, error.why, error.fix) == ("what", "a.py:1", "because", "do")
    assert str(ShardingError("what")) == "what" and isinstance(error, ValueError)


def test_where_is_the_line_of_the_wrong_call():
    lines = set()  # what a trace that fails assigns to a variable is as it was

    def deep(x):
        lines.add(user_line())
        return gspmd.mark_sharding(x + 1, MESH, "modle _")  # the line after the one of user_line()

    with pytest.raises(ShardingError) as caught:
        plan(deep, X, mesh=MESH)
    (line,) = lines
    name, number = line.rsplit(":", 1)
    assert name.endswith("test_errors.py") and caught.value.where == f"{name}:{int(number) + 1}"


def test_did_you_mean():
    assert did_you_mean("modl", ["data", "model"]) == "did you mean 'model'?"
    assert did_you_mean("xyz", ["data", "model"]) == "use one of 'data', 'model'"
    assert did_you_mean("xyz", []) == "there is none"


def test_sparse_arguments():
    for near, what in (
        (torch.eye(4).to_sparse(), "an operand of sin is sparse_coo"),
        (torch.eye(4).to_sparse_csr(), "argument 'arg0' is sparse_csr"),
    ):
        assert message(lambda near=near: plan(torch.sin, near, mesh=MESH)).startswith(
            f"{what}, and a layout is one of dense tensors"
        )


def test_sparse_and_nested_tensors_inside():
    near = torch.eye(4).to_sparse()
    for program in (
        lambda x: near @ near,
        lambda x: torch.sparse.mm(near.to_sparse_csr(), x),
        lambda x: x.to_sparse() @ x,
    ):
        assert "is sparse_coo, and a layout is one of dense" in message(
            lambda program=program: plan(program, torch.ones(4, 4), mesh=MESH)
        )
    padded = (
        "pad it to the longest (torch.nested.to_padded_tensor), with a mask, before the program"
    )
    ragged = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    assert padded in message(
        lambda: plan(lambda x: nn.functional.linear(ragged, x), torch.ones(4, 4), mesh=MESH)
    )
    assert padded in message(lambda: plan(torch.sin, ragged, mesh=MESH))


def test_sparse_buffers_and_factors_that_do_not_match():
    net = nn.Linear(8, 4)
    net.register_buffer("near", torch.eye(4).to_sparse())
    assert message(lambda: plan(net, X, mesh=MESH)).startswith(
        "'near' is sparse_coo, and a layout is one of dense tensors"
    )
    with pytest.raises(
        RuntimeError,
        match=r"shapes \[4, 7\] and \[4, 8\] cannot be multiplied: 'b' of cb,ab->ca is 7 and 8",
    ):
        plan(nn.Linear(8, 4), X[:, :7], mesh=MESH)


def test_a_result_that_is_an_iterator():
    assert message(lambda: plan(lambda x: (x * i for i in range(2)), X, mesh=MESH)) == (
        f"the program returns an iterator, of whose values none is computed yet{WHERE}\n"
        "  fix   return a list"
    )


def test_numbers_that_are_known_only_when_a_program_runs():
    class Logs(nn.Module):
        def forward(self, x):
            self.last = x.sum().item()
            return x * 2

    assert message(lambda: plan(Logs(), X, mesh=MESH)).startswith(
        "the program puts a number into 'self.last' that is known only when it runs"
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * int(x.sum()),
        lambda x: x * float(x.sum()),
        lambda x: x * max(1, x.sum().item()),
        lambda x: x * min([x.sum().item(), 1]),
        lambda x: x * max(1, x.sum()) + isinstance(int(x.sum().item()), int),
    ],
    ids=["int", "float", "max", "min", "types"],
)
def test_functions_of_python_that_need_a_number(function):
    """They take numbers that are known only when the program runs; afterwards they are Python's."""
    assert_same(plan(function, X, mesh=MESH).simulate(X), function(X))
    assert {"int", "float", "max", "min"}.isdisjoint(globals())


def test_a_type_of_python_as_a_dtype():
    text = message(lambda: plan(lambda x: x.to(float) * int(x.sum()), X, mesh=MESH))
    assert text.startswith("int or float is a dtype in code that calls it on a number")


def test_numbers_in_a_format():
    def log(x):
        return f"{x.sum().item():.2f}"

    assert message(lambda: plan(log, X, mesh=MESH)).startswith(
        "forward formats a value that only a run knows as"
    )


@pytest.mark.parametrize(
    "draw, name", [(random.random, "Python"), (lambda: float(numpy.random.rand()), "NumPy")]
)
def test_random_numbers_that_are_not_of_torch(draw, name):
    with pytest.warns(
        UserWarning,
        match=f"draws random numbers from {name}: every run of the program gets those that were "
        "drawn when",
    ):
        plan(lambda x: x * draw(), X, mesh=MESH)


def test_a_gradient_that_is_not_retained_is_warned_of():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            self.hidden = self.first(x)
            self.hidden.retain_grad()
            self.second.weight.retain_grad()  # of a leaf it means nothing
            return self.second(self.hidden).sum()

    with pytest.warns(UserWarning, match="forward calls retain_grad.*register_hook") as found:
        gspmd.plan(Keeps(), torch.randn(4, 4), mesh=Mesh(data=2), grad=True)
    assert len([w for w in found if "retain_grad" in str(w.message)]) == 1


def test_values_of_a_library_of_models_have_its_lines(tmp_path, monkeypatch):
    """The user's own line, if it is in the model; else the library's, not the call of all of it."""
    folder = tmp_path / "lib" / "python3.11" / "site-packages"
    folder.mkdir(parents=True)
    lines = ("import torch", "def double(x):", "    return torch.add(x, x)")
    (folder / "shop.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(folder)
    double = __import__("shop").double

    def lines_of(f):
        nodes = gspmd.plan(f, torch.ones(4), mesh=MESH).captured.graph.nodes
        return {node.meta["source"] for node in nodes if node.meta.get("source")}

    assert lines_of(double) == {"shop.py:3"}
    (mine,) = lines_of(lambda x: double(x))
    assert mine.startswith("tests/test_errors.py:")


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.loss = nn.Embedding(5, 3), nn.CrossEntropyLoss()

    def forward(self, x, y):
        return self.loss(self.table(x), y)


@pytest.mark.parametrize("index", [3, -1, 70])
def test_a_target_outside_of_the_classes(index):
    target = torch.tensor([0, index, 1])
    model, x = Classifier(), torch.tensor([0, 1, 4])
    compiled = plan(model, x, torch.tensor([0, 1, 2]), mesh=MESH)
    text = message(lambda: compiled.simulate(x, target))
    assert text.splitlines()[:3] == [
        f"index {index} is outside of 3 rows, in module 'loss'",
        "  where test_errors.py:N",
        "  why   a class, a token or a position is 0 to 2 there",
    ]


def test_a_token_outside_of_the_vocabulary():
    model, y = Classifier(), torch.tensor([0, 1, 2])
    compiled = plan(model, torch.tensor([0, 1, 4]), y, mesh=MESH)
    text = message(lambda: compiled.simulate(torch.tensor([0, 1, 5]), y))
    assert text.startswith("index 5 is outside of 5 rows, in module 'table'")


ALL_OPTIONS = [
    (reader, name)
    for reader in ("plan", "parallelize")
    for name in sorted({*NAMED[reader], *(row.name for row in rows_for(reader))})
]


@pytest.mark.parametrize("reader, name", ALL_OPTIONS)
def test_a_misspelt_option_names_the_nearest(reader, name):
    draw = random.Random(reader + name)
    at = draw.randrange(1, len(name))
    for wrong in (name[:at] + name[at + 1 :], name[:at] + "x" + name[at:], name + "s"):
        if wrong in NAMED[reader] or wrong in [row.name for row in rows_for(reader)]:
            continue
        use = (
            (lambda wrong=wrong: plan(lambda x: x.sin(), X, mesh=MESH, **{wrong: 1}))
            if reader == "plan"
            else (lambda wrong=wrong: gspmd.parallelize(nn.Linear(8, 8), MESH, **{wrong: 1}))
        )
        assert f"did you mean '{name}'?" in message(use), wrong
