"""Options: one table, which functions, type checkers, docs and the command line follow."""

import argparse
import inspect
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from torch import nn

import torchgspmd as gspmd
from torchgspmd.compiler import option_types
from torchgspmd.compiler.options import OPTIONS, Options, options_table, rows_for
from torchgspmd.tools import plan_command

DOCS = Path(__file__).parents[2] / "docs"
MESH = gspmd.Mesh(data=1, model=2)
TYPES = {
    "plan": option_types.PlanOptions,
    "parallelize": option_types.ParallelizeOptions,
    "suggest": option_types.Precision,
}
FUNCTIONS = {"plan": gspmd.plan, "parallelize": gspmd.parallelize, "suggest": gspmd.suggest}


@pytest.mark.parametrize("reader", TYPES)
def test_type_checkers_know_the_table(reader):
    declared = get_type_hints(Options)
    assert get_type_hints(TYPES[reader]) == {
        row.name: declared[row.name] for row in rows_for(reader)
    }


@pytest.mark.parametrize("reader", TYPES)
def test_a_signature_shows_the_table(reader):
    parameters = inspect.signature(FUNCTIONS[reader]).parameters
    assert all(parameters[row.name].default == row.default for row in rows_for(reader))


def test_docs_show_the_table():
    assert options_table() in (DOCS / "parallelize.md").read_text()


def test_every_option_has_a_reader():
    assert all(row.readers and row.doc.endswith(".") for row in OPTIONS)


def refused(call) -> str:
    with pytest.raises(gspmd.ShardingError) as error:
        call()
    return str(error.value).replace("\n", "")


@pytest.mark.parametrize("name", [row.name for row in rows_for("parallelize")])
def test_a_misspelt_option_is_answered_with_the_name(name):
    text = refused(lambda: gspmd.parallelize(nn.Linear(4, 4), MESH, **{name + "s": None}))
    assert f"parallelize has no option '{name}s'" in text and f"did you mean '{name}'?" in text


def test_plan_knows_options_from_arguments_of_the_function():
    def f(x, scale):
        return x * scale

    x = torch.ones(4)
    plan = gspmd.plan(f, x, mesh=MESH, scale=2.0, rng="native")
    torch.testing.assert_close(plan.simulate(x, scale=2.0), 2 * x)
    text = refused(lambda: gspmd.plan(f, x, mesh=MESH, scale=2.0, regahter="never"))
    assert "no such argument" in text and "did you mean 'regather'?" in text


@pytest.mark.parametrize("row", [r for r in rows_for("parallelize") if r.choices], ids=str)
def test_a_wrong_choice_lists_them(row):
    text = refused(lambda: gspmd.parallelize(nn.Linear(4, 4), MESH, **{row.name: "none such"}))
    assert text.startswith(f"there is no {row.name} 'none such'; there are ")
    assert all(repr(choice) in text for choice in row.choices)


def test_unmarked_weights_are_stored_as_parallelize_stores_them():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
    gspmd.mark_sharding(model[0].weight, MESH, "model _")
    x = torch.ones(2, 4)
    found = {}
    for way in ("propagated", "replicated"):
        plan = gspmd.plan(model, x, mesh=MESH, unmarked=way)
        found[way] = [str(spec) for spec in plan.input_layouts]
        plan_of = plan.simulate(x)
        torch.testing.assert_close(plan_of, model(x))
    assert found == {
        "propagated": ["model _", "_ model", "_ _"],
        "replicated": ["model _", "_ _", "_ _"],
    }


def test_the_command_line_takes_the_options_of_plan():
    parser = argparse.ArgumentParser()
    plan_command.add_arguments(parser)
    given = parser.parse_args(
        "f.py --mesh data=2 --param-dtype bfloat16 --regather never --skip-passes bucket".split()
    )
    assert given.param_dtype is torch.bfloat16 and given.regather == "never"
    assert given.skip_passes == ["bucket"] and given.strict is None
    with pytest.raises(SystemExit):
        parser.parse_args("f.py --mesh data=2 --reduce-dtype bfloat17".split())
