"""Compare the layout of GShard's experts, marked on their weights alone, with random layouts.

    python benchmarks/expert_layouts.py             # 12 sizes, 50 layouts each: some minutes
    python benchmarks/expert_layouts.py --sizes 2 --layouts 10

The layer of tests/models.py (top-2 router, capacity, one-hot einsums) is planned with its backward.
A random layout marks the tokens, the masks, what goes to the experts and comes back, each on a
random dimension or none; half of the layouts leave some of these to the search. Prints a row for
each size: bytes of a device, those of the best random layout, and the collectives. Exits with 1 if
a random layout sends less.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from pathlib import Path

import torch

import torchgspmd as gspmd

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from models import GShardLayer  # noqa: E402

WIDTH, HIDDEN, SEQUENCE = 512, 2048, 256
SIZES = [  # groups, experts, devices
    (8, 8, 4),
    (64, 64, 16),
    (8, 8, 8),
    (8, 64, 4),
    (8, 64, 8),
    (16, 16, 4),
    (16, 64, 16),
    (32, 8, 8),
    (32, 32, 8),
    (32, 16, 16),
    (64, 8, 4),
    (64, 16, 16),
]


def layer(experts: int, mesh: gspmd.Mesh) -> GShardLayer:
    """Return the layer on the meta device, with marks on the weights of its experts."""
    with torch.device("meta"):
        model = GShardLayer(experts, WIDTH, HIDDEN, max(2 * SEQUENCE // experts, 4))
    gspmd.annotate(model, mesh, {"up": "expert _ _", "down": "expert _ _"})
    return model


def planned(groups: int, experts: int, devices: int, rng: random.Random | None) -> gspmd.Plan:
    """Return the plan of a size; with rng, of a random layout."""
    mesh = gspmd.Mesh(expert=devices)
    model = layer(experts, mesh)
    x = torch.empty(groups, SEQUENCE, WIDTH, device="meta", requires_grad=True)
    tokens = None
    if rng is not None:
        share = rng.choice((1.0, 0.5))

        def anywhere(t: torch.Tensor) -> torch.Tensor:
            """Mark a value on a random dimension, or on none."""
            return gspmd.mark_sharding(t, mesh, spec(t)) if rng.random() < share else t

        def spec(t: torch.Tensor) -> str:
            """Return a random layout."""
            at = rng.choice([-1, *(d for d, n in enumerate(t.shape) if n % devices == 0)])
            return " ".join("expert" if d == at else "_" for d in range(t.dim()))

        tokens = spec(x) if rng.random() < share else None
        model.mark = model.mark_tokens = anywhere
    return gspmd.plan(model, x, mesh=mesh, in_specs=tokens, grad=True)


def main() -> int:
    """Print the table; return 1 if a random layout sends less."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, default=len(SIZES))
    parser.add_argument("--layouts", type=int, default=50)
    options, worse = parser.parse_args(), 0
    print("groups experts devices    KiB sent  best random  collectives")
    for size in SIZES[: options.sizes]:
        rng, plan = random.Random(0), planned(*size, None)
        best = min(planned(*size, rng).sent_bytes for _ in range(options.layouts))
        kinds: Counter[str] = Counter()
        for c in plan.collectives:
            kinds[c.kind] += c.count
        worse += best < plan.sent_bytes
        row = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
        print(
            "{:6} {:7} {:7}".format(*size),
            f"{plan.sent_bytes / 1024:11.0f} {best / 1024:12.0f}  {row}",
            flush=True,
        )
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
