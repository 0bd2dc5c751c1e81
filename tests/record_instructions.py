"""Record the instructions of a Python, for test_instructions.py. Needs no torch.

    for python in 3.10 3.11 3.12 3.13 3.14; do python$python tests/record_instructions.py; done

Each run replaces the lines of its Python in recorded_instructions.jsonl.
"""

import dis
import json
import sys
from pathlib import Path
from types import CodeType

FILE = Path(__file__).with_name("recorded_instructions.jsonl")
MANY = 300  # more names than an instruction can say without EXTENDED_ARG

# name -> source of a function f
PROGRAMS = {
    "globals": """
def f(x):
    return x * settings.SCALE + table.inner.gain(x) + len(x)
""",
    "augmented": """
def f(self, x):
    settings.inner.count += 1
    self.calls += settings.step
    return x
""",
    "several_locals": """
def f(self, x):
    y = x * 2
    return torch.add(y, self.gain) + y.own_method(x, self.bias)
""",
    "super": """
class C(Base):
    def f(self, x):
        return super().helper(x) + super().forward(x)
f = C.f
""",
    "comprehension": """
def f(self, x):
    return [self.layer(part) * SCALE for part in x], {k: self.table[k] for k in KEYS}
""",
    "closure": """
def make():
    gain, net, calls = 1, None, 0
    def f(self, x):
        nonlocal calls
        calls = calls + 1
        return lambda: net.inner.layer(x) * gain + self.layer(x)
    return f
f = make()
""",
    "class_in_function": """
def f(x):
    class Local(Base):
        limit: Unread = LIMIT
        kept = x
    return Local
""",
    "closure_of_class": """
def f(x):
    class Local:
        kept = x.kept
    return Local
""",
    "stores": """
def f(self, x):
    global LAST
    LAST = x
    self.seen, settings.mode = x, 1
    return LAST
""",
    "imports": """
def f(x):
    import mine.tools as t
    from yours import scale
    return t.run(scale(x))
""",
    "uses": """
def f(self, x):
    self.seen.append(x)
    LAST["loss"] = x
    LOG.update(loss=x)
    self.rows["a"].append(x)
    self.groups.setdefault("k", []).append(x)
    WHOLE[:] = [x]
    WHOLE[1:3] = x, x
    PARTS[1:].append(x)
    self.extended.extend(y for y in x)
    return x
""",
    "reads": """
def f(self, x):
    kept = self.seen
    x.append(kept)
    first = SECOND; x.append(first[0])
    if self.flag:
        self.counted += 1
    a, b = FIRST, self.pair
    x.append(a)
    return len(self.rows), self.groups["k"], [r for r in LOG], WHOLE[1:]
""",
    "with_and_try": """
def f(self, x):
    with self.lock:
        try:
            self.seen.append(x)
        except Problem as e:
            self.failed.append(e)
        finally:
            DONE.append(x)
    return (yield x)
""",
    "keywords": """
def f(self, x):
    return self.layer(x, scale=settings.SCALE, **self.options)(*PARTS)
""",
    "many_names": "def f(self, x):\n"
    + "".join(f"    x.name{i}\n" for i in range(MANY))
    + "    return settings.LAST_ONE * self.last_layer(x)\n",
}


def function_code(source):
    table = {"Base": object}
    exec(compile(source, "<recorded>", "exec", dont_inherit=True), table)
    return table["f"].__code__


def nested_code(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested_code(constant)


def recorded(code):
    """A code object as JSON."""
    jumps = {*dis.hasjrel, *dis.hasjabs}
    return {
        "variables": code.co_varnames[:1],
        "names": code.co_names,
        "strings": [c for c in code.co_consts if isinstance(c, str)],
        "instructions": [
            (i.opname, *row) if any(row := values_of(i, jumps)) else (i.opname,)
            for i in dis.get_instructions(code)
        ],
    }


def values_of(i, jumps):
    """The other fields of torchgspmd.capture.state.instructions.Instruction."""
    is_name = isinstance(i.argval, str) or "_FAST" in i.opname
    text = i.argrepr if i.opname == "BINARY_OP" else ""
    growth = dis.stack_effect(i.opcode, i.arg)
    return i.argval if is_name else 0, text, growth, int(i.opcode in jumps)


def opcodes():
    """Names in dis.opmap: those with a name or a variable, and the others."""
    named = {dis.opname[i] for table in (dis.hasname, dis.haslocal, dis.hasfree) for i in table}
    return {
        "named": sorted(named & dis.opmap.keys()),
        "others": sorted(dis.opmap.keys() - named),
    }


def main():
    version = "{}.{}".format(*sys.version_info)
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    lines = [line for line in lines if json.loads(line)["python"] != version]
    lines.append(json.dumps({"python": version, "opcodes": opcodes()}))
    for name, source in PROGRAMS.items():
        bodies = [recorded(code) for code in nested_code(function_code(source))]
        if name == "many_names":  # the last line, and what EXTENDED_ARG precedes in it
            bodies[0]["instructions"] = bodies[0]["instructions"][-30:]
            bodies[0]["names"] = bodies[0]["names"][-3:]
        lines.append(json.dumps({"python": version, "program": name, "bodies": bodies}))
    FILE.write_text("".join(line + "\n" for line in sorted(lines)))


if __name__ == "__main__":
    main()
