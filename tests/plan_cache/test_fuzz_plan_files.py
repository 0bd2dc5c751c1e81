"""Plan files that were changed: the same result, or one ShardingError.

The checksum of a changed file is made right again, so that what is behind it is tested. Run many
more by hand:

    FUZZ_CASES=20000 python -m pytest -q -s tests/plan_cache/test_fuzz_plan_files.py
"""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import traceback

import pytest
import torch
from mutations import BYTES, changed_values
from torch import nn
from torch._higher_order_ops import scan

import torchgspmd as gspmd
from torchgspmd import Mesh, Plan, ShardingError
from torchgspmd.compat.private_apis import _pytree as pytree
from torchgspmd.compiler.plan_cache.plan_files import with_checksum

CASES = int(os.environ.get("FUZZ_CASES", "200"))
SECONDS = 20  # that a case takes at most


class Net(nn.Module):
    """Parameters of one shape, a buffer that is written, constants, and a tuple of results."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(4))
        gspmd.mark_sharding(self.up.weight, Mesh(data=2, model=2), "model _")

    def forward(self, x):
        self.calls.add_(1)
        y = self.down(self.up(x).relu() * torch.tensor([0.5, 1.0, 2.0, 3.0])).sigmoid()
        return y.mean(), {"y": y.detach(), "numbers": (3, 4)}


def _scan(x):
    def step(carry, row):
        return carry + row.sin(), carry * row

    return scan(step, torch.zeros(4), x)


def _functions(x, y):
    return torch.where(x > 0, x - y, y * 2).sort(0).values, (x @ y.T).cumsum(1)


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """(model, arguments, text, result) of each plan."""
    torch.manual_seed(1)
    x, y, mesh = torch.randn(6, 4), torch.randn(6, 4), Mesh(data=2, model=2)
    calls = [
        (Net(), (x,), {"grad": True, "in_specs": ("data _",)}),
        (_scan, (x,), {"in_specs": ("_ model",)}),
        (_functions, (x, y), {"in_specs": ("data _", "_ model")}),
        (lambda x: torch.nn.functional.dropout(x, 0.5) + 1, (x,), {"in_specs": ("data model",)}),
        (nn.Linear(4, 4), (x,), {"dynamic": {"input": {0}}}),
    ]
    result = []
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    for function, args, options in calls:
        gspmd.plan(function, *args, mesh=mesh, **options).save(path)
        model = function if isinstance(function, nn.Module) else None
        text = path.read_bytes()
        result.append((model, args, text, _result_of(path, model, args)))
    return result


def _result_of(path, model, args):
    """The result of the plan of a file, with buffers as before."""
    state = {k: v.clone() for k, v in model.state_dict().items()} if model else {}
    try:
        plan = Plan.load(path, model)
        _look(plan)
        torch.manual_seed(2)
        result = plan.simulate(*args)
    finally:
        if model:
            model.load_state_dict(state)
    leaves, tree = pytree.tree_flatten(result)
    return [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in leaves], tree


def _look(plan):
    """Every view of a plan."""
    str(plan), str(plan.report()), plan.trace(), plan._repr_html_(), plan.diff(plan)
    for value in plan.layouts.spec:
        plan.explain(value.name)


def _is_same(one, other):
    if one[1] != other[1]:
        return False
    return all(
        a.equal(b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        for a, b in zip(one[0], other[0], strict=True)
    )


def _body(content: bytes) -> str:
    """The JSON of a file, without format and checksum."""
    text = json.loads(content)
    return json.dumps({k: v for k, v in text.items() if k not in ("format", "sha256")})


def _changed(content: bytes, rng: random.Random) -> bytes:
    """A changed file."""
    if rng.random() < 0.05:
        return rng.choice(BYTES)(content, rng)
    body = _body(content)
    if rng.random() < 0.2:
        new = rng.choice(BYTES)(body.encode(), rng)
        return with_checksum(new)
    return with_checksum(changed_values(body, rng).encode())


def _too_long(*_):
    raise TimeoutError


def outcome(path, model, args, right):
    """What a file leads to: refused, the same, or a fault."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    try:
        found = _result_of(path, model, args)
    except ShardingError:
        return "refused"
    except BaseException as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error} {traceback.format_exc()[-600:]}"
    finally:
        signal.alarm(0)
    return "the same" if _is_same(found, right) else f"another result {found[0][:3]}"


def test_a_changed_file_gives_the_same_result_or_one_error(plans, tmp_path):
    path, counts, faults = tmp_path / "plan.json", collections.Counter(), []
    for seed in range(CASES):
        rng = random.Random(seed)
        model, args, content, right = plans[seed % len(plans)]
        path.write_bytes(_changed(content, rng))
        result = outcome(path, model, args, right)
        counts[result if result in ("refused", "the same") else result[:40]] += 1
        if result not in ("refused", "the same"):
            faults.append((seed, result))
    print(f"{CASES} changed plan files: {dict(counts)}")
    assert not faults, "\n".join(f"{seed}: {text}" for seed, text in faults[:40])
