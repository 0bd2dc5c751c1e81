"""What a device sends: the golden table of all features and pairs, and what a pair may send.

sent_bytes.json has a row for each. `python -m composition --sent` adds those that it lacks,
`--sent all` computes all of them again.
"""

from __future__ import annotations

import json
from pathlib import Path

from .features import sets
from .judge import bytes_sent

TABLE = Path(__file__).with_name("sent_bytes.json")
# Refused pairs have no row.
SENT: dict[str, float | None] = json.loads(TABLE.read_text()) if TABLE.exists() else {}


def every() -> list[str]:
    """Return the sets that have a row."""
    return ["+".join(names) for size in (1, 2) for names in sets(size)]


def complete(again: bool) -> None:
    """Write the rows that the table lacks, or all."""
    for name in every():
        if again or name not in SENT:
            SENT[name] = bytes_sent(tuple(name.split("+")))
            write()


def write() -> None:
    """Write the table, without rows of sets that are no longer."""
    rows = {name: SENT[name] for name in every() if name in SENT}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(n)}" for name, n in rows.items())
    TABLE.write_text(f"{{\n{lines}\n}}\n")
