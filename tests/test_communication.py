"""communication=: each collective that is not agreed is reported, and no other one."""

import random
import re
import sys
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

import torchgspmd as gspmd
from torchgspmd.compiler.agreement import Agreement
from torchgspmd.compiler.plan_cache.guard_text import content

sys.path.insert(0, str(Path(__file__).parent / "tools/report"))
from test_golden import MESH, SPECS, Net, plan_of

TENSOR = {f"blocks.{i}.{name}": 0 for i in range(3) for name in ("up.weight", "down.weight")}


def marked(marks):
    with torch.device("meta"):
        model, tokens = Net(), torch.zeros(8, 6, dtype=torch.long)
    specs = {name: SPECS[name.split(".", 2)[2]][choice] for name, choice in marks.items()}
    return gspmd.annotate(model, MESH, specs), tokens


def planned(marks, communication, grad=True):
    model, tokens = marked(marks)
    options = {"mesh": MESH, "in_specs": "data _", "grad": grad}
    return gspmd.plan(model, tokens, communication=communication, **options)


def error_of(call):
    try:
        call()
    except gspmd.ShardingError as error:
        return error
    return None


def reported(error):
    """Return how often each collective is reported: by phase, kind, axes, dtype, module, bytes."""
    rows = Counter()
    for line in error.what.splitlines()[1:] if error else ():
        *name, sent = line.strip().split("  at ")[0].split("  ")
        count, size = re.fullmatch(r"(\d+) x (.*)", sent).groups()
        rows[(*name, size)] += int(count)
    return rows


def rows_of(collectives):
    rows = Counter()
    for c in collectives:
        module = re.sub(r"(?<![^.])\d+(?![^.])", "*", c.module) or "(outside)"
        size = f"{c.sent_bytes / c.count:,.2f}".removesuffix(".00")
        phase = "backward" if c.backward else "forward"
        rows[phase, c.kind, "+".join(c.axes), c.dtype, module, f"{size} B"] += c.count
    return rows


@pytest.mark.parametrize("seed", range(8))
def test_rows_agree_to_what_they_say_and_no_more(seed):
    """The reported collectives are those of the plan that no row matches, one by one."""
    draw = random.Random(seed)
    marks = dict(TENSOR)
    for _ in range(draw.choice((0, 1, 2))):
        name = draw.choice([*marks])
        marks[name] = draw.randrange(len(SPECS[name.split(".", 2)[2]]))
    plan = plan_of(marks)
    chosen = [
        (
            draw.choice(("*", *{c.kind for c in plan.collectives})),
            draw.choice(("*", *{"+".join(c.axes) for c in plan.collectives})),
            draw.choice(("*", "blocks.*", "*.down", "*.up.weight", "blocks.1.*")),
        )
        for _ in range(draw.choice((1, 2, 3)))
    ]

    def allowed(c):
        return any(
            kind in ("*", c.kind)
            and axes in ("*", "+".join(c.axes))
            and (fnmatchcase(c.module, glob) or fnmatchcase(c.module, f"{glob}.*"))
            for kind, axes, glob in chosen
        )

    error = error_of(lambda: planned(marks, [" ".join(row) for row in chosen]))
    assert reported(error) == rows_of(c for c in plan.collectives if not allowed(c))
    if error is not None:
        assert error.why and error.fix


@pytest.mark.parametrize("seed", range(6))
def test_a_golden_text_agrees_to_its_own_lines(seed, tmp_path):
    """After a random edit all that is sent beyond the text is reported; less is no error."""
    draw = random.Random(100 + seed)
    path, other = tmp_path / "plan.txt", dict(TENSOR)
    one = plan_of(TENSOR)
    one.check(path, update=True)
    assert error_of(lambda: planned(TENSOR, path)) is None
    name = draw.choice([*other])
    other[name] = draw.randrange(1, len(SPECS[name.split(".", 2)[2]]))
    two = plan_of(other)
    error = error_of(lambda: planned(other, str(path)))
    assert reported(error) == rows_of(two.collectives) - rows_of(one.collectives)
    if error is not None and error.tried:
        assert "mark_sharding(%" in error.fix or "annotate(" in error.fix


def test_the_mark_that_was_wrong_is_found(tmp_path):
    path, wrong = tmp_path / "plan.txt", {**TENSOR, "blocks.1.up.weight": 1}
    plan_of(TENSOR).check(path, update=True)
    error = error_of(lambda: planned(wrong, path))
    assert 'annotate(model, mesh, {"blocks.1.up.weight": ' in error.fix and error.tried


def test_budgets():
    rows = ["all_reduce model *.down {}", "* data", "* *"]
    sent = sum(
        c.sent_bytes
        for c in plan_of(TENSOR).collectives
        if c.kind == "all_reduce" and c.axes == ("model",) and c.module.endswith("down")
    )
    enough, less = (f"{sent + extra:.0f}B" for extra in (0, -1))
    assert error_of(lambda: planned(TENSOR, [rows[0].format(enough), *rows[1:]])) is None
    error = error_of(lambda: planned(TENSOR, [rows[0].format(less), *rows[1:]]))
    assert "fix   raise that budget" in str(error) and less in error.why
    everything = plan_of(TENSOR).sent_bytes
    assert error_of(lambda: planned(TENSOR, [f"{everything:.0f} B"])) is None
    assert "the budget of all" in error_of(lambda: planned(TENSOR, ["1 kB"])).why


def test_phases():
    error = error_of(lambda: planned(TENSOR, ["forward * *"]))
    assert reported(error) and {row[0] for row in reported(error)} == {"backward"}
    assert error_of(lambda: planned(TENSOR, ["forward * *", "backward *"])) is None


@pytest.mark.parametrize(
    "given, part",
    [
        (["all_redcue model"], "did you mean 'all_reduce'?"),
        (["all_reduce modle"], "did you mean 'model'?"),
        (["blocks.*"], "begins with no kind"),
        ([""], "begins with no kind"),
        ("all_reduce model", "there is no file"),
        (3, "communication is 3"),
    ],
)
def test_what_cannot_be_read(given, part):
    error = error_of(
        lambda: gspmd.plan(
            torch.sum, torch.ones(4), mesh=MESH, in_specs="data", communication=given
        )
    )
    assert part in str(error) and "where" in str(error)


def test_a_changed_file_is_another_key(tmp_path):
    """The plan cache compares what was agreed, not the name of the file."""
    path, keys = tmp_path / "plan.txt", []
    for marks in (TENSOR, {}):
        plan_of(marks).check(path, update=True)
        keys.append(content(Agreement.of(path), {}))
    assert keys[0] != keys[1]


# ---------------------------------------------------------------------------------------- explicit


X, W = torch.ones(4, 8), torch.ones(8, 16)


def product(name):
    def function(x, w):
        y = x @ w
        return torch.relu(gspmd.reshard(y, "data _") if name else y)

    return lambda **options: gspmd.plan(
        function, X, W, mesh=MESH, in_specs=("data model", "model _"), **options
    )


def test_an_exchange_has_to_be_named():
    error = error_of(lambda: product(False)(communication="explicit"))
    assert 'gspmd.reshard(x, "data _")' in error.fix and len(reported(error)) == 1
    plan = product(True)(communication="explicit")
    assert [c.named for c in plan.collectives] == [True]
    assert torch.equal(plan.simulate(X, W), torch.relu(X @ W))
    assert error_of(lambda: product(False)(communication=["named", "all_reduce model"])) is None


def test_the_gradient_of_a_named_exchange_is_named():
    class Named(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(8, 8))

        def forward(self, x):
            y = gspmd.reshard(x @ self.w, "data _")
            z = gspmd.reshard(torch.sin(y), "_ model")
            return gspmd.reshard(z.square().mean(), "")

    plan = gspmd.plan(
        Named(), torch.ones(8, 8), mesh=MESH, in_specs="data _", grad=True, communication="explicit"
    )
    assert all(c.named for c in plan.collectives if not c.backward)


def test_reshard_outside_of_a_program_checks_its_rank():
    assert gspmd.reshard(X, "data _") is X
    assert "2 dimensions" in str(error_of(lambda: gspmd.reshard(X, "data")))


def test_reshard_names_axes_of_the_mesh():
    error = error_of(lambda: gspmd.plan(lambda x: gspmd.reshard(x, "dat _"), X, mesh=MESH))
    assert "has no axis 'dat'" in str(error) and "test_communication.py" in error.where
    layout = gspmd.Layout({"batch": "data", "wide": "model"}).on(MESH)
    plan = gspmd.plan(lambda x: gspmd.reshard(x, "batch wide"), X, mesh=layout, in_specs="batch _")
    assert str(plan.out_specs[0]) == "data model"
