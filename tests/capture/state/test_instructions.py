"""Steps on each Python: from its recorded instructions, and from those of the one that runs."""

import collections
import json
import re
from pathlib import Path

import pytest
from record_instructions import FILE, PROGRAMS, function_code, opcodes

from torchgspmd.capture.state import bytecode_names, instructions
from torchgspmd.capture.state import instructions as reading
from torchgspmd.capture.state.instructions import ACTIONS, Body, Instruction, steps

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
HERE = "this Python"
LINES = [json.loads(line) for line in FILE.read_text().splitlines()]
OPCODES = {line["python"]: line["opcodes"] for line in LINES if "opcodes" in line}
RECORDED = {(line["python"], line["program"]): line["bodies"] for line in LINES if "bodies" in line}

Code = collections.namedtuple("Code", "python program")

# program -> what its function f reads, in sets; absent: nothing
GLOBALS = {
    "globals": "settings.SCALE table.inner.gain len",
    "augmented": "settings.inner.count settings.step",
    "several_locals": "torch.add",
    "super": "super",
    "comprehension": "SCALE KEYS",
    "class_in_function": "Base LIMIT Unread",
    "closure_of_class": "",
    "stores": "settings LAST",
    "uses": "LAST LOG.update WHOLE PARTS",
    "reads": "SECOND FIRST len LOG WHOLE",
    "with_and_try": "Problem DONE.append",
    "keywords": "settings.SCALE PARTS",
    "many_names": "settings.LAST_ONE",
}
CELLS = {
    "closure": "net.inner.layer gain self.layer x calls",
    "comprehension": "self.layer self.table",
    "class_in_function": "x",
    "closure_of_class": "x.kept",
}
# attributes of the first argument, and others that tensors do not have
METHODS = {
    "globals": "SCALE gain",
    "augmented": "calls step",
    "several_locals": "gain own_method bias",
    "super": "helper forward",
    "comprehension": "layer table",
    "closure": "layer",
    "stores": "",
    "imports": "run",
    "uses": "seen rows groups extended",
    "reads": "seen flag counted pair rows groups",
    "with_and_try": "lock seen failed",
    "keywords": "layer SCALE options",
    "many_names": "LAST_ONE last_layer",
}
STORES = {
    "augmented": "attribute count, attribute calls",
    "closure": "cell calls",
    "stores": "global LAST, attribute seen, attribute mode",
    "reads": "attribute counted",
}
IMPORTS_OWN = {"imports"}
USES = {
    "uses": {
        "seen": ".append",
        "LAST": "[]=",
        "LOG": "[]=",
        "rows": "[].append",
        "groups": "[].append",
        "WHOLE": "[]=",
        "PARTS": "[].append",
        "extended": ".append",
    },
    "reads": dict.fromkeys(
        ("seen", "SECOND", "flag", "counted", "FIRST", "pair", "rows", "groups", "LOG", "WHOLE"),
        "read",
    ),
    "with_and_try": {"seen": ".append", "failed": ".append", "DONE": ".append", "lock": "read"},
}


@pytest.fixture(params=[*PYTHONS, HERE])
def code_of(request, monkeypatch):
    """A function that returns a program's code, read from this Python or from a record."""
    if request.param == HERE:
        return lambda program: function_code(PROGRAMS[program])
    for module in (bytecode_names, instructions):
        monkeypatch.setattr(module, "bodies", recorded_bodies)
    return lambda program: Code(request.param, program)


def recorded_bodies(code):
    result = []
    outer = RECORDED[code][0]["variables"]
    for body in RECORDED[code]:
        rows = [
            Instruction(*row, *(0, "", 0, False)[len(row) - 1 :]) for row in body["instructions"]
        ]
        first = frozenset((*outer, *body["variables"]))
        result.append(Body(tuple(steps(rows)), first, tuple(body["names"]), tuple(body["strings"])))
    return tuple(result)


def words(names):
    return {".".join(each) for each in names}


@pytest.mark.parametrize("program", PROGRAMS)
def test_names(code_of, program):
    code = code_of(program)
    assert words(bytecode_names.dotted_names(code)) == {*GLOBALS.get(program, "").split()}
    dotted = bytecode_names.dotted_names(code, reading.CELL)
    cells = {name for name in words(dotted) if not name.startswith("__")}
    # A comprehension may be a function of its own, or not.
    assert cells <= {*CELLS.get(program, "").split()}
    if program != "comprehension":
        assert cells == {*CELLS.get(program, "").split()}
    # A module's attributes are among the methods of unknown objects, by their names.
    methods = {*bytecode_names._method_names(code)}
    assert methods >= {*METHODS.get(program, "").split()}
    stored = {
        f"{kind} {name}"
        for kind in ("global", "attribute", "cell")
        for name in bytecode_names._stored_names(code, f"store {kind}")
        if not name.startswith("__")
    }
    assert stored == {x for x in STORES.get(program, "").split(", ") if x}
    assert bytecode_names.imports_own_modules(code) == (program in IMPORTS_OWN)


@pytest.mark.parametrize("program", USES)
def test_uses(code_of, program):
    found = collections.defaultdict(set)
    for name, use in instructions._uses_in_code(code_of(program)):
        found[name].add(use)
    assert {name: found[name] for name in USES[program]} == {
        name: {use} for name, use in USES[program].items()
    }


def without_actions(opcodes):
    return {
        name
        for name in opcodes["named"]
        if name not in ACTIONS and not reading._LOCALS.search(name)
        if not name.startswith("INSTRUMENTED_")  # `dis` shows what they stand for
    }


# They read nothing: they delete, create a closure, or store in a class's body.
SILENT = {
    "DELETE_ATTR", "DELETE_DEREF", "DELETE_FAST", "DELETE_GLOBAL", "DELETE_NAME",
    "IMPORT_FROM", "LOAD_CLOSURE", "MAKE_CELL", "STORE_NAME",
}  # fmt: skip


@pytest.mark.parametrize("python", [*PYTHONS, HERE])
def test_each_instruction_with_a_name_has_an_action(python):
    named = without_actions(opcodes() if python == HERE else OPCODES[python])
    # Only the compiler has these.
    pseudo = {"LOAD_SUPER_METHOD", "LOAD_ZERO_SUPER_ATTR", "LOAD_ZERO_SUPER_METHOD"}
    assert named - pseudo <= SILENT


def test_all_actions_occur_in_a_recorded_python():
    everywhere = {name for each in OPCODES.values() for kind in each.values() for name in kind}
    assert ACTIONS.keys() <= everywhere
    assert {*OPCODES} == {*PYTHONS}
    assert RECORDED.keys() == {(python, program) for python in PYTHONS for program in PROGRAMS}


@pytest.mark.parametrize(
    "file, pattern",
    [
        ("pyproject.toml", r"Python :: (3\.\d+)"),
        (".github/workflows/tests.yml", r'"(3\.\d+)"(?=[,\]])'),
        ("docs/limits.md", r"Python (3\.10) to (3\.14)"),
    ],
)
def test_the_pythons_of_the_package_are_recorded(file, pattern):
    text = (Path(__file__).parents[3] / file).read_text()
    found = [x for match in re.finditer(pattern, text) for x in match.groups()]
    assert {PYTHONS[0], PYTHONS[-1]} <= {*found} <= {*PYTHONS}
    assert len(found) in (2, len(PYTHONS))
