"""Changes of a JSON text, for fuzz tests: of its bytes, and of its typed values."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

# Values that no encoder writes, or that break a size, a name or a number.
STRANGE = (
    *(10**30, -1, 2**63, 2**31, 0, 1e308, True, None, "", "x;import os", "__class__", "\ud800"),
    *("aten.from_file.default", "os.system", "../../x", [], {}, [[]], ["node", -1]),
    *(["node", 10**6], ["record", 10**6], ["function", "os", "system"], ["dict", ["dict"]]),
    *(["operator", "aten.from_file.default"], ["torch", "load"], ["tree", ["os.system", None]]),
    *(["tensor", [2**40, 2**40], [1, 1], ["torch", "float32"], "cpu"], ["float", "nan"]),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    parts = [value]
    while parts:
        part = parts.pop()
        items = part.items() if isinstance(part, dict) else enumerate(part)
        for key, item in list(items):
            yield part, key
            if isinstance(item, (list, dict)):
                parts.append(item)


def swap_alike(root: Any, rng: random.Random) -> None:
    """Swap two values of one type."""
    found = list(places(root))
    if not found:
        return
    one, key = rng.choice(found)
    alike = [(p, k) for p, k in found if type(p[k]) is type(one[key]) and p[k] != one[key]]
    if alike:
        other, place = rng.choice(alike)
        one[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(one[key])


def swap_in_part(root: Any, rng: random.Random) -> None:
    """Swap two values of one type in one part of a text, as two targets or two operands."""
    values = root.values() if isinstance(root, dict) else root
    parts = [part for part in values if isinstance(part, (list, dict)) and part]
    if parts:
        swap_alike(rng.choice(parts), rng)


def replace_strangely(root: Any, rng: random.Random) -> None:
    """Replace a value by a strange one."""
    part, key = rng.choice(list(places(root)))
    part[key] = copy.deepcopy(rng.choice(STRANGE))


def change_number(root: Any, rng: random.Random) -> None:
    """Change a number a little, or negate a bool."""
    found = [(p, k) for p, k in places(root) if type(p[k]) in (int, float, bool)]
    part, key = rng.choice(found)
    value = part[key]
    part[key] = not value if type(value) is bool else value + rng.choice((-1, 1, 2))


def rename(root: Any, rng: random.Random) -> None:
    """Replace a text by another text of the file."""
    found = [(p, k) for p, k in places(root) if type(p[k]) is str]
    part, key = rng.choice(found)
    other, place = rng.choice(found)
    part[key] = other[place]


def drop(root: Any, rng: random.Random) -> None:
    """Remove a value."""
    part, key = rng.choice(list(places(root)))
    del part[key]


def repeat(root: Any, rng: random.Random) -> None:
    """Repeat an item of a list."""
    found = [(p, k) for p, k in places(root) if isinstance(p, list)]
    part, key = rng.choice(found)
    part.insert(key, copy.deepcopy(part[key]))


def nest(root: Any, rng: random.Random) -> None:
    """Nest a value deeply."""
    part, key = rng.choice(list(places(root)))
    value = part[key]
    for _ in range(rng.choice((3, 400))):
        value = ["tuple", value]
    part[key] = value


TYPED: tuple[Callable[[Any, random.Random], None], ...] = (
    swap_alike,
    swap_alike,
    swap_in_part,
    swap_in_part,
    replace_strangely,
    change_number,
    rename,
    drop,
    repeat,
    nest,
)


def changed_values(text: str, rng: random.Random) -> str:
    """The text of JSON with one of its typed values changed."""
    root = json.loads(text)
    rng.choice(TYPED)(root, rng)
    return json.dumps(root)


def flip(content: bytes, rng: random.Random) -> bytes:
    """Flip a bit."""
    changed = bytearray(content)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def printable_flip(content: bytes, rng: random.Random) -> bytes:
    """Replace a byte by another one that texts have."""
    changed = bytearray(content)
    changed[rng.randrange(len(changed))] = rng.choice(b'0123456789abcdefgx_.,[]{}:" -')
    return bytes(changed)


def truncate(content: bytes, rng: random.Random) -> bytes:
    """Cut the end off."""
    return content[: rng.randrange(len(content))]


def insert(content: bytes, rng: random.Random) -> bytes:
    """Insert what is no JSON, no UTF-8 or deeply nested."""
    at = rng.randrange(len(content))
    more = rng.choice((b"\xff\xfe", b"NaN", b"-Infinity", b"[" * 10**5, b"9" * 5000, b"\0", b"{"))
    return content[:at] + more + content[at:]


BYTES = (flip, printable_flip, truncate, insert)
