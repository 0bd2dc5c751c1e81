"""Golden texts of plans: each change is one line, and no line shifts without a change."""

import random
import re
from collections import Counter

import pytest
import torch
from torch import nn

import torchgspmd as gspmd
from torchgspmd.compiler.golden import COMMUNICATION, SECTIONS, Golden

MESH = gspmd.Mesh(data=2, model=4)
SPECS = {
    "up.weight": ("model _", "_ model", "_ _", "data model", "model data"),
    "down.weight": ("_ model", "model _", "_ _", "data model"),
    "norm.weight": ("_", "model", "data"),
}
NAMES = [f"blocks.{i}.{name}" for i in range(3) for name in SPECS]


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=16, hidden=64, words=32, layers=3):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def plan_of(marks, batch=8, mesh=MESH, **sizes):
    with torch.device("meta"):
        model, tokens = Net(**sizes), torch.zeros(batch, 6, dtype=torch.long)
    specs = {name: SPECS[name.split(".", 2)[2]][choice] for name, choice in marks.items()}
    gspmd.annotate(model, mesh, specs)
    return gspmd.plan(model, tokens, mesh=mesh, in_specs="data _", grad=True)


def drawn(seed):
    """Return a random program, and one with one or two edits: marks or a size."""
    draw = random.Random(seed)
    count = {name: len(SPECS[name.split(".", 2)[2]]) for name in NAMES}
    marks = {name: draw.choice((0, 0, 0, 1, 2)) % count[name] for name in NAMES}
    sizes = {"width": draw.choice((16, 24)), "hidden": draw.choice((32, 64))}
    other, others = dict(marks), dict(sizes)
    for _ in range(draw.choice((1, 2))):
        if draw.random() < 0.7:
            name = draw.choice(NAMES)
            other[name] = draw.randrange(count[name])
        else:
            others[draw.choice(("width", "hidden", "words", "batch"))] = draw.choice((8, 16, 36))
    return plan_of(marks, **sizes), plan_of(other, **others)


def collectives(plan):
    rows = Counter()
    for c in plan.collectives:
        rows[c.kind, "+".join(c.axes), c.dtype, round(c.sent_bytes / c.count, 2)] += c.count
    return rows


def values(text):
    """Return how often each value stands in one side of a change's line."""
    return Counter(
        {
            float(size.replace(",", "")): int(count or 1)
            for count, size in re.findall(r"(?:(\d+) x )?([\d,.]+) B", text)
        }
    )


def reported(message):
    """Return the collectives that an error reports as more, and as fewer, than in the file."""
    more, fewer = Counter(), Counter()
    for line in message.splitlines():
        if not (found := re.match(r"  (new|gone|changed) +(forward|backward)  (.*)", line)):
            continue
        kind, axes, dtype, _, sizes = found[3].split("  at ")[0].split("  ")
        before, arrow, after = sizes.partition(" -> ")
        if not arrow:
            before, after = ("", sizes) if found[1] == "new" else (sizes, "")
        old, new = values(before), values(after)
        for sign, rows in ((more, new - old), (fewer, old - new)):
            for size, count in rows.items():
                sign[kind, axes, dtype, size] += count
    return more, fewer


def message_of(plan, path):
    try:
        plan.check(path)
    except gspmd.ShardingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("seed", range(10))
def test_the_lines_are_the_difference(seed, tmp_path):
    one, two = drawn(seed)
    path = tmp_path / "plan.txt"
    one.check(path, update=True)
    one.check(path)
    message = message_of(two, path)
    more, fewer = reported(message)
    # A collective that moves to another module is one more and one fewer.
    more.subtract(fewer)
    change = collectives(two)
    change.subtract(collectives(one))
    assert {k: n for k, n in more.items() if n} == {k: n for k, n in change.items() if n}
    # Nothing else is said about communication: each line stands in one text more than in the other.
    rows = [golden.sections[COMMUNICATION] for golden in (one.golden, two.golden)]
    changed = {row[:-1] for row in (rows[0] | rows[1]) if rows[0][row] != rows[1][row]}
    assert len(re.findall(r"  (?:forward|backward)  ", message)) == len(changed)
    assert bool(message) == (one.text() != two.text())
    two.check(path, update=True)
    assert path.read_text() == two.text() and not message_of(two, path)


def test_a_text_is_read_as_it_is_written():
    for seed in range(2):
        for plan in drawn(seed):
            golden = plan.golden
            assert Golden.parse(f"# a comment\n\n{golden}", "it") == golden
            assert list(golden.changes(Golden.parse(str(golden), "it"))) == []


def test_each_change_is_one_line_with_its_cause(tmp_path):
    path = tmp_path / "plan.txt"
    plan_of({}, batch=8).check(path, update=True)
    lines = message_of(plan_of({"blocks.1.down.weight": 0}), path).splitlines()
    assert lines[1] == (
        "  changed  blocks.*.down.weight  3 x f32[16, 64] -> f32[16, 64@model], 2 x f32[16, 64]"
    )
    assert any(
        re.fullmatch(r"  new      forward  all_reduce  model .* blocks.\*.down .* at .*:\d+", line)
        for line in lines
    )
    shape = message_of(plan_of({}, words=33), path).splitlines()
    assert "  changed  embed.weight  f32[32, 16] -> f32[33, 16]" in shape
    assert message_of(plan_of({}, mesh=gspmd.Mesh(data=4)), path).splitlines()[1] == (
        "  changed  mesh  data=2 model=4 -> data=4"
    )


def test_places_are_modules_and_weights():
    """A gathered weight has its name, also where it is cast first; a sum its module's path."""
    with torch.device("meta"):
        model, tokens = Net(), torch.zeros(8, 6, dtype=torch.long)
    gspmd.annotate(model, MESH, {"**.up.weight": "data _", "**.down.weight": "_ model"})
    plan = gspmd.plan(
        model, tokens, mesh=MESH, in_specs="data _", grad=True, param_dtype=torch.bfloat16
    )
    places = {(c.dtype, c.module) for c in plan.collectives if not c.backward}
    for i in range(3):
        assert ("bf16", f"blocks.{i}.up.weight") in places
        assert ("bf16", f"blocks.{i}.down") in places


def test_no_line_shifts_with_what_communicates_nothing():
    """More operations, other names of values and other lines of source change no other line."""

    class Longer(Net):
        def forward(self, tokens):
            junk = [torch.relu(self.head.bias * i).sum() for i in range(3)]
            return super().forward(tokens) + 0 * sum(junk)

    with torch.device("meta"):
        models, tokens = (Net(), Longer()), torch.zeros(8, 6, dtype=torch.long)
    one, two = (
        gspmd.plan(
            gspmd.annotate(m, MESH, {"**.down.weight": "_ model"}),
            tokens,
            mesh=MESH,
            in_specs="data _",
        ).golden
        for m in models
    )
    assert {c.section for c in one.changes(two)} <= {"memory"}


@pytest.mark.parametrize(
    "text, part",
    [
        (None, "there is no file"),
        ("", "does not begin with"),
        ("torchgspmd plan, format 2\nmesh\n  data=2\n", "does not begin with"),
        ("torchgspmd plan, format 1\nmesh\n  data=2  more\n", "a line that no plan has"),
        ("torchgspmd plan, format 1\n  data=2\n", "a line that no plan has"),
        (b"\xff\xfe\x00", "is no text"),
    ],
)
def test_a_file_that_is_no_golden_text(text, part, tmp_path):
    path = tmp_path / "plan.txt"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    message = message_of(gspmd.plan(torch.sum, torch.ones(4), mesh=gspmd.Mesh(data=2)), path)
    assert part in message and "fix" in message


def test_every_section_has_fields():
    assert all(plan_of({}).golden.sections[name] is not None for name in SECTIONS)


TEST = """
import torch, torchgspmd as gspmd
def test_sum(check_plan):
    x = torch.empty({size}, device="meta")
    check_plan(gspmd.plan(torch.sum, x, mesh=gspmd.Mesh(data=2), in_specs="data"))
"""


def test_pytest_has_a_fixture_and_an_option(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plugins = "-p torchgspmd.integrations.pytest_plans -p no:faulthandler -p no:cacheprovider"
    plugins += " -p no:unraisableexception"  # it scans all objects of this process five times

    def run(size, *options):
        """Run pytest in this process, which has imported torch."""
        (tmp_path / f"test_{size}.py").write_text(TEST.format(size=size))
        line = ["-q", "-s", *plugins.split(), *options, "--rootdir=.", f"test_{size}.py"]
        return pytest.main(line), capsys.readouterr().out

    assert run(4)[0] == 1
    assert run(4, "--update-plans")[0] == 0
    assert (tmp_path / "golden_plans" / "test_sum.txt").exists()
    assert run(4)[0] == 0
    code, out = run(8)
    assert code == 1 and "inputs  8 B -> 16 B" in out
