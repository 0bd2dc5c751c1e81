"""Models whose sizes depend on values: plan, numbers and gradients, against one device.

Vision towers need transformers, detectors torchvision, the Conformer the files of torchaudio.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same
from torch import Tensor, nn

import torchgspmd as gspmd

if torch.__version__ < "2.10":
    pytest.skip("torch 2.9 cannot trace slices by numbers", allow_module_level=True)

MESH = gspmd.Mesh(data=2, model=2)
LIBRARIES: list[torch.library.Library] = []  # what is defined as long as they live


class Loss(nn.Module):
    """A number of what a model computes."""

    def __init__(self, model: nn.Module, result: Callable = lambda y: y):
        super().__init__()
        self.model, self.result = model, result

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.result(self.model(*args, **kwargs)).square().sum()


def check(model: nn.Module, marks: dict[str, str], *calls: tuple, **options: Any) -> gspmd.Plan:
    """Compare one plan with the model, for the arguments of several calls."""
    gspmd.annotate(model, MESH, marks)
    args, kwargs = calls[0]
    model(*args, **kwargs)  # anchors of another dtype are stored at the first call
    plan = gspmd.plan(model, *args, mesh=MESH, grad=True, **options, **kwargs)
    for args, kwargs in calls:
        model.zero_grad()
        loss = model(*args, **kwargs)
        loss.backward()
        got, gradients = plan.simulate(*args, **kwargs, _poison=True)
        assert_same(got, loss)
        for name, parameter in model.named_parameters():
            assert_same(gradients[name], parameter.grad, name)
    return plan


# ------------------------------------------------------------------------------ graphs and tables


class GraphNet(nn.Module):
    """A layer over edges, then PyG's global_mean_pool: as many graphs as the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.message, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        h, (source, target) = self.encode(x).relu(), edges
        h = torch.zeros_like(h).index_add(0, target, self.message(h)[source]).relu()
        size = int(batch.max()) + 1
        index = batch.view(-1, 1).expand_as(h)
        total = h.new_zeros(size, h.shape[1]).scatter_add_(0, index, h)
        ones = h.new_ones(batch.shape[0])
        count = h.new_zeros(size).scatter_add_(0, batch, ones).clamp(min=1)
        return self.head(total / count.view(-1, 1))


def test_pooling_of_graphs():
    model = Loss(GraphNet())
    x, edges = torch.randn(10, 6), torch.randint(0, 10, (2, 24))
    batch = torch.tensor([0] * 4 + [1] * 3 + [2] * 3)
    calls = [((x, edges, numbers), {}) for numbers in (batch, 2 * batch)]
    check(model, {"model.message.weight": "model _"}, *calls, in_specs=("data _", None, "data"))
    marks = {"model.message.weight": "_ _", "model.head.weight": "_ _"}
    plan = check(model, marks, *calls, in_specs=None)
    assert not plan.collectives


class DLRM(nn.Module):
    """Bags of rows of sharded tables, and their products with dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, 8, mode="sum") for n in (1000, 1500, 700))
        self.bottom, self.top = nn.Linear(5, 8), nn.Linear(6 + 8, 1)

    def forward(self, dense: Tensor, rows: list[Tensor], offsets: list[Tensor]) -> Tensor:
        x = self.bottom(dense).relu()
        bags = [table(r, o) for table, r, o in zip(self.tables, rows, offsets)]
        features = torch.stack([x, *bags], 1)  # [batch, 4, 8]
        products = features @ features.mT
        i, j = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, products[:, i, j]], 1)).sigmoid()


def test_tables_with_offsets():
    model = Loss(DLRM())
    dense = torch.randn(4, 5)
    rows = [torch.randint(0, n, (9,)) for n in (1000, 1500, 700)]
    calls = []
    for starts in ([0, 2, 2, 5], [0, 0, 4, 8]):
        calls.append(((dense, rows, [torch.tensor(starts)] * 3), {}))
    for spec in ("model _", "_ model", "data+model _"):
        plan = check(model, {"model.tables.*.weight": spec}, *calls)
        assert all(c.payload_bytes <= 9 * 8 * 4 for c in plan.collectives)  # no table is sent


# ------------------------------------------------------------------------------------------ audio


def test_conformer():
    """The model as torchaudio publishes it; the package itself needs a library for its torch."""
    package = importlib.util.find_spec("torchaudio")
    if package is None:
        pytest.skip("torchaudio is not installed")
    file = Path(package.submodule_search_locations[0]) / "models" / "conformer.py"
    spec = importlib.util.spec_from_file_location("conformer", file)
    conformer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conformer)
    layers = dict(num_layers=1, depthwise_conv_kernel_size=3, dropout=0.0)
    model = Loss(conformer.Conformer(16, 4, 32, **layers).double(), lambda y: y[0])
    marks = {
        "**.ffn?.sequential.1.weight": "model _",
        "**.ffn?.sequential.4.weight": "_ model",
        "**.out_proj.weight": "_ model",
    }
    calls = [((torch.randn(4, 10, 16).double(), torch.tensor([10, 7, 5, n])), {}) for n in (9, 2)]
    check(model, marks, *calls, in_specs=("data _ _", "data"))


class Padded(nn.Module):
    """Attention with the Conformer's mask: as long as the longest sequence, which is that of x."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(8, 4), nn.LayerNorm(8)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        longest = int(lengths.max())
        mask = torch.arange(longest).expand(len(lengths), longest) >= lengths.unsqueeze(1)
        y = self.norm(x).transpose(0, 1)
        y, _ = self.attention(y, y, y, key_padding_mask=mask, need_weights=False)
        return F.silu(y + x.transpose(0, 1))


def test_a_mask_of_the_longest_sequence():
    calls = [((torch.randn(4, 6, 8).double(), torch.tensor([6, 3, 5, n])), {}) for n in (1, 4)]
    marks = {"model.attention.out_proj.weight": "_ model"}
    check(Loss(Padded().double()), marks, *calls, in_specs=("data _ _", None))


# ----------------------------------------------------------------------------------------- images

BLOCKS = {
    "qwen2_vl": {"fc1": "model _", "fc2": "_ model"},
    "qwen2_5_vl": {"gate_proj": "model _", "up_proj": "model _", "down_proj": "_ model"},
}
SIZES = dict(depth=2, num_heads=4, patch_size=4, spatial_merge_size=2, temporal_patch_size=2)


def tower(name: str) -> nn.Module:
    """A tiny vision tower. It computes norms in float32."""
    models = pytest.importorskip("transformers.models")
    pytest.importorskip("transformers.vision_utils")
    if name == "qwen2_vl":
        config = models.qwen2_vl.configuration_qwen2_vl.Qwen2VLVisionConfig(
            embed_dim=32, hidden_size=24, mlp_ratio=2, **SIZES
        )
        cls = models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel
    else:
        config = models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            window_size=16,
            out_hidden_size=24,
            fullatt_block_indexes=[1],
            **SIZES,
        )
        cls = models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel
    config._attn_implementation = "sdpa"
    return cls(config)


def marks_of(name: str) -> dict[str, str]:
    layers = {"qkv": "model _", "attn.proj": "_ model"} | BLOCKS[name]
    return {f"**.{layer}.weight": spec for layer, spec in layers.items()}


def sizes_of(name: str, grid: Tensor) -> dict[str, Tensor]:
    """What transformers lets a caller compute before the tower."""
    from transformers import vision_utils

    sizes = {
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid),
        "position_ids": vision_utils.get_vision_position_ids(grid, 2),
    }
    if name == "qwen2_5_vl":
        window = vision_utils.get_vision_window_index(grid, 2, 16, 4)
        sizes |= dict(zip(("window_index", "cu_window_seqlens"), window))
    return sizes


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_vision_towers(name):
    """One program for images of any sizes: heads are sharded in each piece of the sequence."""
    model = Loss(tower(name), lambda y: y.pooler_output)
    pixels = torch.randn(48, 3 * 2 * 4 * 4)
    grids = [torch.tensor(sizes) for sizes in ([[1, 4, 4], [1, 4, 8]], [[1, 4, 8], [1, 4, 4]])]
    calls = [((pixels, grid), sizes_of(name, grid)) for grid in grids]
    plan = check(model, marks_of(name), *calls)
    attention = [n for n in plan.sharded.nodes if "attention" in str(n.target)]
    assert attention and all(any(n.meta["assignment"].values()) for n in attention)


class OfGrid(nn.Module):
    """A tower whose sizes are an argument that is no tensor: a program for each."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor, grid: list[list[int]]) -> Tensor:
        return self.model(pixels, torch.tensor(grid)).pooler_output


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_vision_towers_of_one_grid(name):
    pixels = torch.randn(64, 3 * 2 * 4 * 4)
    check(Loss(OfGrid(tower(name))), marks_of(name), ((pixels, [[2, 4, 4], [1, 4, 8]]), {}))


class Backbone(nn.Module):
    out_channels = 16

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, 4, 1), nn.Conv2d(16, 16, 3, 2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.first(x).relu()
        return {"0": y, "1": self.second(y).relu()}


class Detector(nn.Module):
    """What a detector of torchvision does in training, on images of one size."""

    def __init__(self, name: str) -> None:
        super().__init__()
        detection = torchvision_detection()
        utils, self.image_list = detection.anchor_utils, detection.image_list.ImageList
        if name == "retinanet":
            anchors = utils.AnchorGenerator(((16,), (32,)), ((1.0,),) * 2)
            model = detection.retinanet.RetinaNet(Backbone(), 3, anchor_generator=anchors)
        else:
            anchors = utils.DefaultBoxGenerator([[2], [2]])
            head = detection.ssd.SSDHead([16, 16], [4, 4], 3)
            model = detection.ssd.SSD(Backbone(), anchors, (32, 32), 3, head=head)
        self.detector, self.name = model, name

    def forward(self, x: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
        from torchvision.ops import box_iou

        features = list(self.detector.backbone(x).values())
        outputs = self.detector.head(features)
        images = self.image_list(x, [tuple(x.shape[-2:])] * len(x))
        arguments = [targets, outputs, self.detector.anchor_generator(images, features)]
        if self.name == "ssd":
            pairs = zip(targets, arguments[-1])
            matcher = self.detector.proposal_matcher
            arguments.append([matcher(box_iou(t["boxes"], a)) for t, a in pairs])
        return sum(self.detector.compute_loss(*arguments).values())


@functools.cache
def torchvision_detection() -> Any:
    """torchvision's detectors. Training needs none of the operators of its library."""
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    with contextlib.suppress(RuntimeError):  # of a library for another torch
        importlib.import_module("torchvision")
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    LIBRARIES.append(library)
    from torchvision.models import detection

    return detection


def targets(*boxes):
    return [
        {"boxes": torch.tensor(b).double(), "labels": torch.tensor([1] * len(b))} for b in boxes
    ]


@pytest.mark.parametrize("name", ["retinanet", "ssd"])
def test_losses_of_detectors(name):
    model = Loss(Detector(name).double())
    images = torch.rand(2, 3, 32, 32).double()
    calls = [
        ((images, targets([[2, 2, 18, 18], [8, 8, 30, 24]], [[4, 4, 20, 22]])), {}),
        ((images, targets([[1, 1, 30, 30], [8, 2, 30, 9]], [[9, 9, 25, 30]])), {}),
    ]
    marks = {"**.first.weight": "model _ _ _", "**.second.weight": "_ model _ _"}
    check(model, marks, *calls, in_specs=("data _ _ _", None))


@pytest.mark.parametrize("name", ["retinanet", "ssd"])
def test_a_detector_says_what_can_be_wrapped(name):
    """It draws the size of its images, and drops boxes by their values."""
    model = Detector(name).detector.train()
    with pytest.raises(gspmd.ShardingError, match="each alone: 'backbone', 'head'"):
        boxes = targets([[2, 2, 18, 18]])
        gspmd.plan(model, [torch.rand(3, 32, 32)], boxes, mesh=MESH, grad=True)
