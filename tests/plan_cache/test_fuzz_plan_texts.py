"""Plans of the cache and of rank 0 that were changed: none is taken, or one without a fault.

A changed file of the cache is not taken, whatever its checksum (SHA-256) is: a secret is in it. So
is a changed message of rank 0. Behind the checksum of that, a text is a plan, or raises Stale.

    FUZZ_CASES=20000 python -m pytest -q -s tests/plan_cache/test_fuzz_plan_texts.py
"""

from __future__ import annotations

import collections
import hashlib
import os
import random

import pytest
import torch
from mutations import BYTES, changed_values
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Mesh, Plan, ShardingError
from torchgspmd.compiler.plan_cache import files
from torchgspmd.compiler.plan_cache.files import Identity
from torchgspmd.compiler.plan_cache.json_text import Stale
from torchgspmd.compiler.plan_cache.plans import decode_plan, encode_plan
from torchgspmd.runtime.shared_plan import packed, unpacked

CASES = int(os.environ.get("FUZZ_CASES", "150"))
MESH = Mesh(data=2, model=2)
KEY = Identity("call", {"module": "1"})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), 2.0
        gspmd.mark_sharding(self.up.weight, MESH, "model _")

    def forward(self, x):
        return self.down(self.up(x).relu() * self.scale * torch.tensor([1.0, 2.0, 3.0, 4.0]))


@pytest.fixture(scope="module")
def text():
    model = Net()
    plan = gspmd.plan(model, torch.ones(6, 4), mesh=MESH, in_specs=("data _",), grad=True)
    return encode_plan(plan, model)


def _changed_line(text: str, rng: random.Random) -> str:
    """The text with a change in one of its lines of JSON."""
    lines = text.split("\n")
    i = rng.choice((0, 0, *range(len(lines))))
    lines[i] = changed_values(lines[i], rng)
    return "\n".join(lines)


def _decode_all(text: str) -> None:
    """Read all of a plan."""
    plan = decode_plan(text, Net(), MESH, Plan)
    str(plan.sharded), str(plan.captured.graph), plan.local_graph()


def test_a_changed_text_is_a_plan_or_stale(text):
    counts, faults = collections.Counter(), []
    for seed in range(CASES):
        rng = random.Random(seed)
        if seed % 4:
            changed = _changed_line(text, rng)
        else:
            changed = rng.choice(BYTES)(text.encode(), rng).decode(errors="replace")
        try:
            _decode_all(changed)
            counts["a plan"] += 1
        except (Stale, ShardingError):
            counts["refused"] += 1
        except Exception as error:  # noqa: BLE001
            faults.append((seed, f"{type(error).__name__}: {error}"))
    print(f"{CASES} changed texts of plans: {dict(counts)}")
    assert not faults, faults[:20]


def test_a_changed_message_of_rank_0_is_refused(text):
    message = packed(KEY, text)
    assert unpacked(message) == (KEY.call, KEY.code, text)
    for seed in range(CASES):
        changed = random.Random(seed).choice(BYTES)(message.encode(), random.Random(seed))
        if changed != message.encode():
            with pytest.raises(Stale):
                unpacked(changed.decode(errors="replace"))
    for wrong in ("", "null\n", "[]\n", '["a", 1]\n', '["a", {"b": 1}]\n'):
        with pytest.raises(Stale):
            unpacked(f"{hashlib.sha256(wrong.encode()).hexdigest()}\n{wrong}")


def test_a_changed_file_of_the_cache_is_not_read(text, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHGSPMD_CACHE", str(tmp_path / "plans"))
    files.write("key", text)
    (path,) = (tmp_path / "plans").iterdir()
    content, read = path.read_bytes(), 0
    assert files.read("key") == text
    for seed in range(CASES):
        rng = random.Random(seed)
        changed = rng.choice(BYTES)(content, rng)
        if seed % 2:  # a checksum that anyone can compute
            body = rng.choice(BYTES)(content[65:], rng)
            changed = hashlib.sha256(body).hexdigest().encode() + b"\n" + body
        path.write_bytes(changed)
        read += files.read("key") is not None and changed != content
    print(f"{CASES} changed files of the cache: {read} were read")
    assert read == 0
