"""Tests that guard and tests that explore: --cases N runs so many cases of each test function."""

from __future__ import annotations

from pathlib import Path

import pytest

# Files of which --cases leaves out nothing: their cases are short, or are counted.
WHOLE = {"prover", "imports", "docstrings", "kinds", "mistakes", "features"}

# Files and functions that explore. Under --cases so many cases of each function guard; `make
# nightly` runs all. Those that are left out take ten seconds and more, and others guard their code.
EXPLORING = {
    "sets": 8,
    "op_db": 1,
    "eager_kernels::test_a_size_of_zero": 20,
    "operand_orders": 1,
    "dynamic_programs": 1,
    "random_programs": 1,
    "migration::test_the_loop_prints_the_same_on_processes": 0,
    "attention::test_numbers": 1,
    "blame::test_a_pipeline_with_rounds": 0,
    "certificate::test_faults_that_change_a_number_are_found": 1,
    "first::test_a_run_goes_on_on_another_mesh": 0,
    "golden_plans": 12,
    "inductor_order": 1,
    "layers_cost_alike": 3,
    "late_group::test_a_train_step": 0,
    "late_group::test_experts": 0,
    "late_group::test_pipelines": 0,
    "loops::test_inductor_compiles_the_body_of_a_loop": 0,
    "models::test_checkpoints": 1,
    "models::test_training_on_processes": 1,
    "published_runs::test_an_estimate_is_that_of_the_table": 0,
    "mixtures": 0,
    "unet3d": 0,
    "halo_reshard": 1,
    "recompute": 1,
    "report::test_the_command_opens_the_other_examples": 1,
    "rings": 1,
    "scheduled": 1,
    "sharded_sizes": 1,
    "halo::test_halos_are_exchanged_in_compiled_programs": 0,
    "examples::test_training_of_experts": 1,
    "examples::test_training_on_processes": 1,
    "examples::test_training_under_torchrun": 0,
    "pasted": 1,
    "on_processes::test_a_set_on_processes": 1,
    "soak::test_a_process_ends_by_itself": 1,
    "steps": 1,
    "suggest::test_arguments_by_keyword": 1,
    "suggest::test_it_finds_what_trying_everything_finds": 1,
    "window_programs": 1,
}


def add_cases_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        type=int,
        help="how many cases of a test function guard it (but see WHOLE and EXPLORING)",
    )


def guard_by_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what explores, with --cases."""
    count = config.getoption("--cases")
    if not count:
        return
    functions: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        functions.setdefault((item.path, item.nodeid.partition("[")[0]), []).append(item)
    kept = []
    for (path, function), cases in functions.items():
        name = path.stem.removeprefix("test_")
        each = f"{name}::{function.rpartition('::')[2]}"
        guards = EXPLORING.get(each, EXPLORING.get(name, count))
        kept += cases if name in WHOLE else spread(cases, guards)
    keep(config, items, kept)


def keep(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    """Deselect all tests but some; all keep their order."""
    ids = {item.nodeid for item in kept}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in ids])
    items[:] = [item for item in items if item.nodeid in ids]


def spread(cases: list[pytest.Item], count: int) -> list[pytest.Item]:
    """Return so many cases at equal distances, the first and the last among them."""
    last = len(cases) - 1
    places = {i * last // max(count - 1, 1) for i in range(min(count, len(cases)))}
    return [cases[place] for place in sorted(places)]
