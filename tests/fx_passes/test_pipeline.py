"""The page of passes: stages follow on each other, and each pass is timed, printed and verified."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardingError
from torchgspmd.capture import PARAMETER
from torchgspmd.features.tables import without_feature
from torchgspmd.fx_passes import pass_runner, pipeline
from torchgspmd.fx_passes.pass_types import FEATURE_PASSES, Step, rows_of
from torchgspmd.fx_passes.pipeline import PIPELINE, Alternatives, Pass, lower_plan, with_pass
from torchgspmd.fx_passes.program import Program, Rank
from torchgspmd.fx_passes.stages import ANNOTATED, CAPTURED, LOCAL, META, RUNNABLE, Stage

ROOT = Path(gspmd.__file__).parent
MESH = Mesh(data=2)
PLANNED = [p.name for step in PIPELINE[:3] for p in getattr(step, "passes", (step,))]
LOWERED = [p.name for p in PIPELINE[3:]]
# not for every program
ELSEWHERE = {
    "store_states",
    "reduce_dtype",
    "draw_natively",
    "hierarchical_sums",
    "regather_weights",
    "recompute",
    "functional_reductions",
    "separate_sums",
}


class Ranks:
    """What lowering asks of the process groups of a mesh, on rank 0 and without processes."""

    mesh, coordinates, device_type, checked_on = MESH, {"data": 0}, "cpu", torch.device("cpu")
    is_gloo, is_fake, hosts = True, False, None

    def group(self, axes: tuple[str, ...]) -> tuple[str, list[int]]:
        return "+".join(axes), list(range(MESH.count(axes)))

    def size(self, name: str) -> int:
        return MESH.count(name.split("+"))

    def position(self, name: str) -> int:
        return 0


def planned(**options: object) -> gspmd.Plan:
    model = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 4))
    x = torch.ones(4, 8)
    return gspmd.plan(model, x, mesh=MESH, in_specs="data _", grad=True, **options)


def lowered(plan: gspmd.Plan, backend: str = "torch") -> Program:
    inputs = plan.captured.inputs
    parameters = {
        i: torch.empty(inp.shape) for i, inp in enumerate(inputs) if inp.kind == PARAMETER
    }
    rank = Rank(Ranks(), backend, parameters, planned, lowered)
    return lower_plan(plan, rank, [True])


# -------------------------------------------------------------------------------------- the tuple


@pytest.mark.parametrize("backend", ["torch", "inductor"])
@pytest.mark.parametrize("choice", [True, False])
def test_each_pass_begins_at_the_stage_where_the_one_before_it_ends(
    backend: str, choice: bool
) -> None:
    program = SimpleNamespace(
        rank=SimpleNamespace(backend=backend),
        request=SimpleNamespace(
            rng="native",
            reduce_dtype=torch.float32,
            hardware=None,
            hosts=0,
            has_budget=True,
            states=frozenset({"momentum"}),
        ),
    )
    stage = CAPTURED
    for step in PIPELINE:
        for each in step.passes if isinstance(step, Alternatives) else (step,):
            if each.when(program) and (choice or each.name != getattr(step, "choice", None)):
                assert each.needs == stage <= each.ensures
                stage = each.ensures
    assert stage == RUNNABLE


def test_names_are_unique_and_what_runs_again_comes_before() -> None:
    names = [each.name for each in pipeline.passes()]
    assert len(names) == len(set(names))
    for each in pipeline.passes():
        assert all(names.index(name) <= names.index(each.name) for name in each.again)


CONSTRAINTS = [
    pytest.param(early, late, each.because, id=f"{early}-{late}")
    for each in pipeline.passes()
    for early, late in (
        *((a, each.name) for a in each.after),
        *((each.name, b) for b in each.before),
    )
]


def order_faults(steps: Sequence[Step]) -> list[str]:
    """Return a sentence for every row that does not stand where its `after` and `before` say."""
    rows = rows_of(steps)
    place = {each.name: i for i, each in enumerate(rows)}
    return [
        f"{early} has to stand before {late}: {each.because}"
        for each in rows
        for early, late in (
            *((a, each.name) for a in each.after),
            *((each.name, b) for b in each.before),
        )
        # Rows that went with their feature bind nobody.
        if early in place and late in place and place[early] > place[late]
    ]


def test_the_rows_stand_where_they_say() -> None:
    names = {each.name for each in pipeline.passes()}
    for each in pipeline.passes():
        assert {*each.after, *each.before} <= names
        assert bool(each.after or each.before) == bool(each.because), each.name
    assert order_faults(PIPELINE) == []


@pytest.mark.parametrize("early, late, because", CONSTRAINTS)
def test_a_row_that_moves_against_its_place_is_named(early: str, late: str, because: str) -> None:
    rows = {each.name: each for each in pipeline.passes()}
    first, second = rows[early], rows[late]
    swapped = [{early: second, late: first}.get(each.name, each) for each in rows.values()]
    fault = f"{early} has to stand before {late}: {because}"
    assert fault in order_faults(swapped)


FEATURES = sorted({each.feature for each in pipeline.passes()} - {"core"})


@pytest.mark.parametrize("feature", FEATURES)
def test_without_the_rows_of_a_feature_other_programs_are_planned(feature: str) -> None:
    text = str(planned())
    with without_feature(feature):
        assert feature not in {each.feature for each in pipeline.passes()}
        plan = planned()
        assert plan.text(full=True) == text
        lowered(plan)


def test_each_docstring_of_a_pass_is_a_row() -> None:
    """A file, or its public function, whose docstring says before and after is a pass: a row.

    The folder `partition` is one pass, and those that run behind it. A module has another name than
    its package: the passes `localize` and `propagate` have packages.
    """
    named = {"localize_graph": "localize", "propagate_layouts": "propagate"}
    described = set()
    for path in (p for f in ("fx_passes", "features") for p in (ROOT / f).rglob("*.py")):
        tree = ast.parse(path.read_text())
        functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
        for node in (tree, *functions) if path.parent.name != "partition" else ():
            lines = (ast.get_docstring(node) or "").split("\n")
            if {"before", "after"} <= {line[:6].strip() for line in lines}:
                name = path.stem if node is tree else node.name
                described.add(named.get(name, name))
    rows = {each.name for each in pipeline.passes()}
    assert {d for d in described - rows if d[0] != "_"} <= {"convert_boundary"}  # two rows
    elsewhere = {"partition", "regather_weights", "merge_axes", "draw_natively"}
    elsewhere |= {"hierarchical_sums", "attention_kernels", "split_vectors"}
    elsewhere |= {"attention_rings", "sink_exits", "stage_sends"}
    assert rows - described == elsewhere | {"convert_inputs", "convert_outputs"}


def test_the_picture_in_the_documentation_has_all_passes_in_order() -> None:
    page = (ROOT.parent / "docs" / "architecture.md").read_text()
    picture = page.partition("```\nCAPTURED")[2].partition("```")[0]
    names = [each.name for each in pipeline.passes()]
    words = dict.fromkeys(word for word in re.findall(r"\w+", picture) if word in names)
    assert list(words) == names


def test_what_may_be_skipped_is_in_the_tuple() -> None:
    names = [
        "attention_rings",
        "balance_attention",
        "bucket",
        "collective_matmul",
        "join_stages",
        "overlap",
        "position_masks",
        "prefetch",
        "ring_pairs",
        "split_exchanges",
    ]
    assert pipeline.skippable() == names
    plan = planned(advanced={"skip_passes": ["bucket", "overlap"]})
    assert "bucket" not in plan.seconds and "overlap" in plan.seconds  # prefetch is done there
    assert "overlap" not in planned(advanced={"skip_passes": ["overlap", "prefetch"]}).seconds
    with pytest.raises(ShardingError, match="there is no pass 'partition'; there are 'attention_"):
        planned(advanced={"skip_passes": ["partition"]})


# -------------------------------------------------------------------------------------- the runner


def test_each_pass_is_timed_printed_and_verified(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    verified: Counter = Counter()
    verify = pass_runner.verify

    def counting(graph, stage, mesh):
        verified[stage] += 1
        verify(graph, stage, mesh)

    monkeypatch.setattr(pass_runner, "verify", counting)
    monkeypatch.setenv("TORCHGSPMD_DUMP", "2")
    plan = planned()
    printed = capsys.readouterr().err
    expected = [name for name in PLANNED if name not in ELSEWHERE]
    assert list(plan.seconds) == ["capture", *expected]
    assert [name for name in expected if f": after {name}\n" not in printed] == []
    lowered(plan)
    printed = capsys.readouterr().err
    expected = [name for name in LOWERED if name not in ELSEWHERE]
    assert [name for name in expected if not plan.seconds.get(name)] == []
    once = LOWERED.index("split_joint")
    for i, name in enumerate(LOWERED):
        assert printed.count(f": after {name}\n") == (name not in ELSEWHERE) * (1 + (i >= once))
    assert [stage for stage in Stage if not verified[stage]] == []


def test_a_dump_level_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHGSPMD_DUMP", "passes")
    with pytest.raises(ShardingError, match="set it to 1"):
        planned()


def test_a_program_for_inductor_writes_over_nothing() -> None:
    program = lowered(planned(), "inductor")
    assert program.stage == RUNNABLE
    names = [str(n.target) for half in (program, program.backward) for n in half.graph.nodes]
    assert not any("all_reduce_." in name or "add_." in name for name in names)


def test_a_key_without_a_row_fails_and_is_named() -> None:
    def colour(program: Program) -> None:
        for node in program.graph.nodes:
            node.meta["colour"] = "red"

    with with_pass(Pass("colour", colour, LOCAL, LOCAL), after="localize"):
        with pytest.raises(AssertionError, match=r"has meta\['colour'\], which has no row"):
            planned()


def test_a_key_at_another_stage_or_of_another_type_fails_and_is_named() -> None:
    def early(program: Program) -> None:
        program.graph.output_node().meta["bytes"] = 1

    with with_pass(Pass("early", early, ANNOTATED, ANNOTATED), after="propagate"):
        with pytest.raises(AssertionError, match=r"meta\['bytes'\] at stage ANNOTATED"):
            planned()

    def wrong(program: Program) -> None:
        program.graph.output_node().meta["backward"] = 1

    with with_pass(Pass("wrong", wrong, LOCAL, LOCAL), after="bucket"):
        with pytest.raises(AssertionError, match=r"meta\['backward'\] of %output is a int"):
            planned()


def test_the_table_has_each_key_that_the_source_names() -> None:
    """Of `.meta["key"]`, `.meta.get("key")`, `"key" in n.meta` and `.meta = {"key": ...}`."""
    keys: dict[str, str] = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for key in key_names(node):
                keys.setdefault(key, f"{path.name}:{node.lineno}")
    traced = {"custom"}  # of make_fx, which capture/normalize.py reads
    assert {k: where for k, where in keys.items() if k not in META.keys() | traced} == {}
    assert set(META) <= keys.keys()


def is_meta(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "meta"


def key_names(node: ast.AST) -> list[str]:
    keys: list[ast.AST] = []
    if isinstance(node, ast.Subscript) and is_meta(node.value):
        keys = [node.slice]
    elif isinstance(node, ast.Call) and is_meta(getattr(node.func, "value", None)):
        keys = node.args[:1]
    elif isinstance(node, ast.Compare) and is_meta(node.comparators[0]):
        keys = [node.left]
    elif isinstance(node, (ast.Assign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(map(is_meta, targets)):
            keys = [k for d in ast.walk(node.value) if isinstance(d, ast.Dict) for k in d.keys]
    return [k.value for k in keys if isinstance(k, ast.Constant) and isinstance(k.value, str)]


# ------------------------------------------------------------------------------------- alternatives


def test_a_pass_of_an_unknown_place_is_an_error() -> None:
    with pytest.raises(ShardingError, match="there is no pass 'localise'"):
        with with_pass(Pass("mine", str, LOCAL, LOCAL), after="localise"):
            pass


def test_passes_are_inserted_while_in_the_context_only() -> None:
    seen: list[str] = []
    mine = Pass("mine", lambda p: seen.append(p.stage.name), LOCAL, LOCAL, optional=("mine",))
    with with_pass(mine, after="localize"):
        assert planned().seconds["mine"] > 0
        assert "mine" not in planned(advanced={"skip_passes": ["mine"]}).seconds
    planned()
    assert seen == ["LOCAL"]


@pytest.mark.parametrize("regather, ways", [("never", 1), ("auto", 2), ("always", 1)])
def test_weights_are_gathered_again_where_a_device_is_too_small(
    regather: str, ways: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counter()
    small = [*PIPELINE]
    small[2] = replace(PIPELINE[2], enough=lambda p: regather == "never")
    token = pipeline._current.set(tuple(small))
    try:
        with with_pass(
            Pass("count", lambda p: counted.update(["localized"]), LOCAL, LOCAL), after="localize"
        ):
            assert ("regather_weights" in planned(advanced={"regather": regather}).seconds) == (
                regather != "never"
            )
    finally:
        pipeline._current.reset(token)
    assert counted["localized"] == ways


@pytest.mark.parametrize("last", [False, True], ids=["cheapest way", "last way"])
def test_a_way_without_a_pass_goes_on_from_where_it_would_have_run(
    last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"decompose_ops": 0, "split_fused": 0, "split_axes": 0, "partition": 0}

    def counting(name: str) -> Pass:
        def count(program: Program) -> None:
            counts[name] += 1

        stage = next(each.ensures for each in pipeline.passes() if each.name == name)
        return Pass(f"count_{name}", count, stage, stage)

    def halves(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b = (x @ w).chunk(2, -1)
        return a * b

    x, w = torch.randn(32, 8), torch.randn(8, 16)
    with ExitStack() as passes:
        if last:
            monkeypatch.setattr(pass_runner, "min", lambda ways, key: ways[-1], raising=False)
        for name in counts:
            passes.enter_context(with_pass(counting(name), after=name))
        plan = gspmd.plan(halves, x, w, mesh=Mesh(model=2), in_specs=("_ _", "_ model"))
    assert counts == {"decompose_ops": 1, "split_fused": 1, "split_axes": 2, "partition": 2}
    assert (" slice(%w" in plan.text(full=True)) != last
    torch.testing.assert_close(plan.simulate(x, w), halves(x, w))


def test_a_feature_s_pass_runs_only_on_a_graph_with_its_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []

    def noting(name: str) -> None:
        def run(program: Program) -> object:
            ran.append(name)
            return before.run(program)

        before = FEATURE_PASSES[name]
        monkeypatch.setitem(FEATURE_PASSES, name, before._replace(run=run))

    for name in FEATURE_PASSES:
        noting(name)
    x, table, index = torch.randn(8, 8), torch.randn(4, 8, 8), torch.randint(4, (8,))
    planned()
    assert ran == []
    gspmd.plan(lambda x: nn.functional.scaled_dot_product_attention(x, x, x), x[None], mesh=MESH)
    passes = {"position_masks", "balance_attention", "ring_keys", "attention_rings"}
    assert set(ran) == passes
    ran.clear()
    gspmd.plan(lambda x, t, i: torch.einsum("tk,tkn->tn", x, t[i]), x, table, index, mesh=MESH)
    assert set(ran) == {"split_groups"}
    ran.clear()
    stack = gspmd.nn.stack([nn.Linear(8, 8) for _ in range(4)])
    gspmd.plan(stack, x, mesh=MESH)
    of_loops = {"sink_exits", "outline_loops", "prefetch_rows"}
    assert set(ran) == of_loops | {"outline_stages", "join_stages"}
