"""Options: one table, which functions, type checkers, docs and the command line follow."""

import argparse
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn

import torchgspmd as gspmd
from torchgspmd.compiler import option_types
from torchgspmd.compiler.options import (
    GROUPS,
    MOVED,
    OPTIONS,
    ROWS,
    AdvancedSettings,
    CheckSettings,
    MemorySettings,
    Option,
    Options,
    rows_for,
)
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
    declared, found = get_type_hints(Options), get_type_hints(TYPES[reader])
    for row in rows_for(reader):
        types = found.pop(row.name)
        # A group is also a mapping, or what stands for one.
        assert types == declared[row.name] or declared[row.name] in get_args(types), row.name
    assert not found


@pytest.mark.parametrize("reader", TYPES)
def test_a_signature_shows_the_table(reader):
    parameters = inspect.signature(FUNCTIONS[reader]).parameters
    assert all(parameters[row.name].default == row.default for row in rows_for(reader))


# What a group may be besides a mapping.
SHORT_TYPES = {"memory": "int | str", "check": "str", "advanced": ""}


def values_of(row: Option) -> str:
    """Return an option's type as a user writes its values."""
    text = " | ".join(f'"{choice}"' for choice in row.choices) or row.type
    if row.name in GROUPS:
        text = f"Mapping | {SHORT_TYPES[row.name]}".removesuffix(" | ")
    text = text.replace("Communication", "Iterable[str] | Path | None")
    return text.replace("Dynamic", "bool | Mapping[str, Dims]")


def options_table() -> str:
    """Return the tables with all options, as docs/parallelize.md shows them."""
    parts = ["\n".join(options_rows(Options, "option"))]
    for group, owner in GROUPS.items():
        parts.append(f"Settings of `{group}`, a mapping:")
        parts.append("\n".join(options_rows(owner, "setting")))
    return "\n\n".join(parts)


def options_rows(owner: type, head: str) -> Iterator[str]:
    yield f"| {head} | values, default | read by | meaning |"
    yield "|---|---|---|---|"
    for row in ROWS[owner]:
        default = f'"{row.default}"' if isinstance(row.default, str) else repr(row.default)
        values = f"`{values_of(row)}`".replace(" | ", "`, `")
        values += "" if row.name in GROUPS else f"; `{default}`"
        readers = ", ".join(row.readers).replace("xla", '"xla"')
        yield f"| `{row.name}` | {values} | {readers} | {row.doc} |"


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
    plan = gspmd.plan(f, x, mesh=MESH, scale=2.0, advanced={"rng": "native"})
    torch.testing.assert_close(plan.simulate(x, scale=2.0), 2 * x)
    text = refused(lambda: gspmd.plan(f, x, mesh=MESH, scale=2.0, advancd={}))
    assert "no such argument" in text and "did you mean 'advanced'?" in text


@pytest.mark.parametrize("row", [r for r in rows_for("parallelize") if r.choices], ids=str)
def test_a_wrong_choice_lists_them(row):
    text = refused(lambda: gspmd.parallelize(nn.Linear(4, 4), MESH, **{row.name: "none such"}))
    assert text.startswith(f"there is no {row.name} 'none such'; there are ")
    assert all(repr(choice) in text for choice in row.choices)


def test_an_axis_that_divides_updates_is_for_parallelize():
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    text = refused(lambda: gspmd.plan(model, x, mesh=MESH, shard_updates="model"))
    assert "a plan changes no model" in text and "pass it to parallelize" in text
    text = refused(lambda: gspmd.parallelize(model, MESH, shard_updates=True))
    assert 'name an axis, such as "data"' in text


def test_unmarked_weights_are_stored_as_parallelize_stores_them():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
    gspmd.mark_sharding(model[0].weight, MESH, "model _")
    x = torch.ones(2, 4)
    found = {}
    for way in ("propagated", "replicated"):
        plan = gspmd.plan(model, x, mesh=MESH, advanced={"unmarked": way})
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


def test_a_group_is_a_mapping_a_record_or_its_short_form():
    read = Options.read
    for value in (
        "8GiB",
        {"recompute": "auto", "budget": "8GiB"},
        MemorySettings("auto", "never", "8GiB"),
    ):
        assert read("plan", {"memory": value}).memory == MemorySettings("auto", "never", "8GiB")
    for value in ("first", {"arguments": "first"}, CheckSettings("first")):
        assert read("parallelize", {"check": value}).check == CheckSettings("first")
    assert read("plan", {"advanced": {"rng": "native"}}).advanced == AdvancedSettings(rng="native")
    for group, value, message in (
        ("memory", {"recmpute": "auto"}, "did you mean 'recompute'?"),
        ("memory", {"budget": "8GiB"}, "nothing keeps to it"),
        ("check", "once", "there is no arguments 'once'"),
        ("advanced", 3, "give a mapping"),
        ("advanced", {"pn": "all"}, "did you mean 'pin'?"),
    ):
        assert message in refused(lambda g=group, v=value: read("parallelize", {g: v}))


@pytest.mark.parametrize("name", sorted(MOVED))
def test_an_old_name_works_with_a_warning(name):
    group, setting = MOVED[name]
    value = {"carriers": ["deep_ep"], "skip_passes": ("bucket",), "costs": {"tie_break": 0.5}}
    value |= {"audit": 3, "verify": True, "memory_budget": "1GiB", "rng": "native", "pin": "all"}
    value |= {"recompute": "auto", "offload": "activations", "regather": "all"}
    value |= {"unmarked": "replicated"}
    reader = {"unmarked": "plan"}.get(name, "parallelize")
    beside = {"memory": {"recompute": "auto"}} if name == "memory_budget" else {}
    with pytest.warns(FutureWarning, match=f'{name}= is {group}={{"{setting}": ...}}'):
        options = Options.read(reader, {name: value[name], **beside})
    assert getattr(getattr(options, group), setting) == value[name]


def test_an_argument_that_has_an_options_name():
    """A TransformerDecoder's memory is a tensor."""
    decoder, x = nn.TransformerDecoderLayer(8, 2, 16, 0.0).eval(), torch.randn(3, 2, 8)
    memory = torch.randn(5, 2, 8)
    plan = gspmd.plan(decoder, x, memory=memory, mesh=MESH)
    torch.testing.assert_close(plan.simulate(x, memory=memory), decoder(x, memory))
    plan = gspmd.plan(decoder, x, memory, mesh=MESH, memory={"recompute": "auto"}, grad=True)
    assert plan.memory.peak


def test_an_argument_with_the_name_of_another_functions_option():
    """`pin` and `audit` are no options of plan."""
    x = torch.ones(4)
    plan = gspmd.plan(lambda x, pin, audit: x * pin + audit, x, pin=2.0, audit=1.0, mesh=MESH)
    torch.testing.assert_close(plan.simulate(x, pin=2.0, audit=1.0), 2 * x + 1)
