"""Defects that only CUDA has: each test fails without its cure, and needs no card.

Tensors of CUDA have no values (meta_card.py). docs/gpu.md has the table of all defects.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from meta_card import CUDA, MetaCard
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchgspmd as gspmd
from torchgspmd.comm import process_groups
from torchgspmd.features.attention import attention_kernels, kernels
from torchgspmd.features.attention.call import AttentionCall, Upstream
from torchgspmd.features.attention.op import attention, attention_in_blocks
from torchgspmd.rules.custom_ops import random, updates

MESH = gspmd.Mesh(data=2)


@pytest.fixture
def card() -> Iterator[MetaCard]:
    with MetaCard() as mode:
        yield mode


class Called(TorchDispatchMode):
    """The names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._opname)
        return func(*args, **(kwargs or {}))

    @property
    def attention(self) -> list[str]:
        return [name for name in self.names if name.startswith("_scaled_dot_product")]


@pytest.mark.parametrize("decoupled", (False, True))
@pytest.mark.parametrize("dtype, calls", ((torch.float32, 1), (torch.float64, 0)), ids=str)
def test_the_rate_of_fused_adam_is_float32(
    dtype: torch.dtype, calls: int, decoupled: bool, card: MetaCard
) -> None:
    """CUDA's kernel reads float32 and refuses another; float64 weights take the formula."""
    rows = [[torch.empty(3, dtype=dtype, device="cuda")] for _ in range(4)]
    step, rates = torch.ones((), device="cuda"), []
    lr = updates.rate(1e-3, step)
    name = "_fused_adamw_" if decoupled else "_fused_adam_"
    with patch.object(updates, name, lambda *args, lr, **options: rates.append(lr.dtype)):
        updates.adam_(*rows, step, lr, 0.9, 0.999, 0.0, 1e-8, decoupled, False)
    assert rates == [torch.float32] * calls


def case(dtype: torch.dtype, heads: int, masked: bool, width: int = 64) -> AttentionCall:
    q = torch.empty(2, heads, 32, width, dtype=dtype, device="cuda")
    k, v = (torch.empty(2, 2, 32, width, dtype=dtype, device="cuda") for _ in range(2))
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool, device="cuda") if masked else None
    return AttentionCall(q, k, v, not masked, 0.125, mask)


@pytest.mark.parametrize(
    "capability, dtype, masked, heads, kernel, count",
    (
        ((9, 0), torch.bfloat16, False, 8, "cudnn_attention", 1),
        ((9, 0), torch.bfloat16, True, 2, "cudnn_attention", 1),
        ((8, 0), torch.float16, False, 8, "flash_attention", 1),
        ((8, 0), torch.bfloat16, True, 2, "efficient_attention", 1),
        ((9, 0), torch.float32, False, 2, "efficient_attention", 1),
        ((9, 0), torch.float32, False, 8, "efficient_attention", 4),
    ),
)
def test_attention_takes_the_fastest_kernel(
    capability: tuple[int, int],
    dtype: torch.dtype,
    masked: bool,
    heads: int,
    kernel: str,
    count: int,
    card: MetaCard,
) -> None:
    """Groups of heads are one call of a kernel that has them, forward and backward."""
    call = case(dtype, heads, masked)
    with patch.object(torch.cuda, "get_device_capability", lambda device: capability):
        with Called() as called:
            out, lse = kernels.kernel(call)
        assert called.attention == [f"_scaled_dot_product_{kernel}"] * count
        assert lse.shape == call.q.shape[:-1], "rings need the logsumexp"
        with Called() as called:
            grads = kernels.backward_kernel(call, Upstream(torch.empty_like(out), out, lse))
        assert called.attention == [f"_scaled_dot_product_{kernel}_backward"] * count
    assert [g.shape for g in grads] == [x.shape for x in (call.q, call.k, call.v)]


def test_deterministic_attention(card: MetaCard) -> None:
    """cuDNN's sums have no fixed order; FlashAttention has one where PyTorch is to have it."""
    call = case(torch.bfloat16, 8, False)
    torch.use_deterministic_algorithms(True)
    try:
        with patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)):
            with Called() as called:
                kernels.kernel(call)
    finally:
        torch.use_deterministic_algorithms(False)
    assert called.attention == ["_scaled_dot_product_flash_attention"]


def test_attention_goes_past_the_registry() -> None:
    """No operation in Python is dispatched at a call, and Inductor sees the kernels."""
    graph = torch.fx.Graph()
    q = graph.placeholder("q")
    node = graph.call_function(attention._opoverload, (q, q, q, True, 0.125))
    for device in ("cpu", "cuda"):
        node.target = attention._opoverload
        request: Any = SimpleNamespace(graph=graph, request=SimpleNamespace(device=device))
        attention_kernels(request)
        assert node.target is attention_in_blocks, device


def test_dropout_is_one_kernel_of_one_byte(card: MetaCard) -> None:
    """Its seed stays on the device, so that a CUDA graph draws anew."""
    filled: list[tuple[Tensor, Tensor]] = []

    def fill(out: Tensor, seed: Tensor, *rest: object) -> bool:
        filled.append((out, seed))
        return True

    seed, kernel = torch.empty((), dtype=torch.int64, device="cuda"), lambda: fill
    with patch.object(random, "_kernel", kernel), patch.object(random, "_bound", int):
        kept = random.dropout_mask(seed, 0.1, random.Shard([8, 64], [0, 0], [8, 64]), CUDA)
    assert kept.dtype == torch.bool and kept.itemsize == 1
    assert [(out is kept, drawn is seed) for out, drawn in filled] == [(True, True)]


def test_planning_opens_no_context_on_a_card() -> None:
    """A context on card 0 takes half a GB in every process."""

    def refuse(*args: object) -> None:
        raise AssertionError("a context is opened")

    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(4, 8)
    layout = gspmd.Layout({"batch": "data", "weights": "data"})
    gspmd.annotate(model, {"*.weight": "weights _"})
    names = ("mem_get_info", "_lazy_init", "get_device_properties", "current_device")
    with patch.multiple(torch.cuda, **dict.fromkeys(names, refuse)):
        gspmd.plan(
            model,
            x,
            mesh=layout.on(MESH),
            grad=True,
            in_specs="batch _",
            advanced={"regather": "auto"},
        )


def test_the_watcher_has_the_limit_of_nccl() -> None:
    """A group of NCCL alone says its own limit; the watcher speaks before it."""
    limit = timedelta(minutes=10)
    backend = SimpleNamespace(options=SimpleNamespace(_timeout=limit))

    def backend_of(device: torch.device) -> Any:
        if device.type == "cpu":
            raise RuntimeError("No backend type associated with device type cpu")
        return backend

    group = SimpleNamespace(_get_backend=backend_of)
    assert process_groups._limit_of(group, CUDA) == limit
