"""Tests that guard and tests that explore: --cases N runs so many cases of each test function."""

from __future__ import annotations

from pathlib import Path

import pytest

# Files of which --cases leaves out nothing: their cases are short, or are counted.
WHOLE = {"prover", "imports", "docstrings", "kinds", "mistakes", "features"}

# Files and functions that explore. Under --cases so many cases of each function guard; `make
# nightly` runs all. Those that are left out take ten seconds and more, and others guard their code.
EXPLORING = {
    "algebra_masks": 8,
    "attention::test_numbers": 0,
    "attention::test_rings": 1,
    "blame::test_a_pipeline_with_rounds": 0,
    "calibrate::test_hosts_have_links_of_their_own": 0,
    "certificate::test_a_value_that_is_rounded_is_found": 0,
    "certificate::test_faults_that_change_a_number_are_found": 1,
    "chosen_loops": 1,
    "communication::test_a_golden_text_agrees_to_its_own_lines": 1,
    "compat::test_the_command": 0,
    "convolutions": 1,
    "copies": 32,
    "counted_bytes": 1,
    "coupled_states": 1,
    "deaths": 1,
    "deaths::test_the_others_name_it": 0,
    "decoder_runs": 1,
    "decoder_runs::test_a_search_without_end_finds_the_best": 0,
    "decoder_runs::test_no_proposal_is_slower_than_the_layout_that_a_run_has": 0,
    "decoder_runs::test_no_step_is_below_its_bound": 0,
    "dependencies::test_cache_of_plans": 1,
    "diloco": 1,
    "diloco::test_a_job_goes_on_with_fewer_processes": 0,
    "dtensors::test_optimizers": 0,
    "dynamic_programs": 1,
    "eager_kernels::test_a_size_of_zero": 20,
    "elastic::test_a_job_outlives_its_processes": 0,
    "elastic::test_ctrl_c_ends_all_processes": 0,
    "evaluation::test_torchmetrics": 0,
    "examples::test_training_of_experts": 1,
    "examples::test_training_on_processes": 1,
    "examples::test_training_under_torchrun": 0,
    "first::test_a_run_goes_on_on_another_mesh": 0,
    "golden_plans": 4,
    "gspmd_paper::test_layers_add_alike": 0,
    "halo::test_halos_are_exchanged_in_compiled_programs": 0,
    "halo_reshard": 1,
    "inductor_order": 1,
    "inductor_order::test_the_order_is_that_of_the_plan": 0,
    "join_stages::test_exchanges_travel_beside_products_of_the_other_half": 1,
    "lanes::test_an_iteration_of_third_degree_sends_what_owners_would": 1,
    "lanes::test_drawn_steps": 1,
    "lanes::test_muon_sends_what_owners_of_matrices_would": 1,
    "late_group::test_a_train_step": 0,
    "late_group::test_experts": 0,
    "late_group::test_pipelines": 0,
    "layers_cost_alike": 1,
    "loops::test_inductor_compiles_the_body_of_a_loop": 0,
    "matrix_states": 1,
    "matrix_states::test_the_bytes_do_not_grow_with_the_length_and_the_plan_is_certified": 0,
    "measured_rows::test_a_row_of_a_model_is_planned": 1,
    "measured_rows::test_experts_and_weights_are_sharded_along_parts_of_axes": 1,
    "microbatches::test_a_whole_step": 0,
    "migration::test_the_loop_prints_the_same_on_processes": 0,
    "mixtures": 0,
    "models::test_checkpoints": 1,
    "models::test_training_on_processes": 1,
    "on_processes": 0,
    "one_rank": 1,
    "op_db": 1,
    "operand_orders": 0,
    "other_device::test_a_plan_on_a_registered_device_is_the_cpus": 0,
    "pasted": 1,
    "plain_containers": 1,
    "plan_cache::test_a_later_start_takes_the_branch_of_each_size": 1,
    "precision::test_inductor": 0,
    "processes::test_the_benchmark_runs": 0,
    "published_runs::test_an_estimate_is_that_of_the_table": 0,
    "random_programs": 1,
    "rank_check::test_errors_of_many_ranks": 0,
    "recompute": 1,
    "recurrences::test_a_running_maximum_that_decays": 0,
    "report::test_the_command_opens_the_other_examples": 1,
    "rings": 1,
    "scheduled": 1,
    "scheduled_pipelines::test_a_model_as_it_is": 0,
    "scheduled_pipelines::test_schedules": 1,
    "sets": 2,
    "sharded_sizes": 1,
    "soak": 0,
    "stages::test_code_gives_its_numbers": 1,
    "stages::test_stages_are_fastest_on_slow_links": 0,
    "states_in_parts": 1,
    "states_in_parts::test_a_plan_says_how_states_are_stored": 0,
    "states_in_parts::test_a_run_goes_on_from_each_kind_of_checkpoint": 0,
    "step_numbers": 1,
    "steps": 1,
    "suggest::test_arguments_by_keyword": 1,
    "suggest::test_it_finds_what_trying_everything_finds": 1,
    "unet3d": 0,
    "value_free::test_rows_are_written_where_values_say": 12,
    "waiting": 1,
    "waiting::test_a_rank_that_sleeps": 0,
    "window_programs": 1,
    "wire": 1,
    "wire::test_the_link_carries_the_bytes_of_each_layout": 0,
    "wire::test_the_link_carries_the_bytes_of_the_plan": 0,
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
        # A worker's group stands behind a name: test_a_long_run_levels_off@ranks.
        name = item.nodeid.partition("[")[0].partition("@")[0]
        functions.setdefault((item.path, name), []).append(item)
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
