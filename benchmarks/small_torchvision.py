"""Models of torchvision, made small by one function: pictures, videos, boxes and optical flow."""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from narrow_models import Built, narrowed, shallower
from torch import Tensor, nn

BATCH, CLASSES, SIDE, POINTS = 2, 11, 64, 17  # no factor divides the number of classes
TRAINING = "_in_training"  # behind the name of a model that takes targets


def nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Indices of the boxes that no better one overlaps, the best first."""
    from torchvision.ops import box_iou

    order = scores.argsort(descending=True, stable=True)
    overlaps = box_iou(boxes[order], boxes[order]) > threshold
    keep: list[int] = []
    for i in range(len(order)):
        if not overlaps[i, keep].any():
            keep.append(i)
    return order[keep]


def without_cuda_ops() -> None:
    """Define the operations without which torchvision cannot be imported on a host without CUDA."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", nms, "CPU")
    without_cuda_ops.library = library
    boxes = importlib.import_module("torchvision.ops.boxes")
    boxes._assert_has_ops = lambda: None  # nms is all that it needs
    align = importlib.import_module("torchvision.ops.roi_align")
    align._roi_align = align._roi_align.__wrapped__  # without torch.compile, which takes a minute


def torchvision_names() -> list[str]:
    """The smallest model of each family; of detectors in evaluation and in training."""
    models = importlib.import_module("torchvision").models
    families: dict[str, dict[str, int]] = {}
    detectors = models.detection.__name__
    for name in models.list_models():
        module = models.get_model_builder(name).__module__
        if ".quantization." in module:  # their weights are no floats
            continue
        weights = next(iter(models.get_model_weights(name)), None)
        size = weights.meta["num_params"] if weights else 10**9
        ends = ("", TRAINING) if module.startswith(detectors) else ("",)
        for end in ends:
            families.setdefault(re.split(r"[\d_]", name)[0] + end, {})[name + end] = size
    return sorted(min(sizes, key=sizes.__getitem__) for sizes in families.values())


FEW = [  # names of constructors' arguments, and their value
    (r"(min|max)_size|image_size", SIDE),
    (r"input_size|spatial_size", (SIDE, SIDE)),
    (r"temporal_size", 4),
    (r"\w*batch_size_per_image", 10_000),  # all, where fewer would be drawn by chance
    (r"score_thresh", 0.0),  # else a new model finds nothing
    (r"\w*nms_top_n\w*|topk_candidates|detections_per_img|\w*_detections_per_img", 16),
]


def torchvision_model(name: str) -> Built:
    """The narrowest and shallowest that runs."""
    models = importlib.import_module("torchvision").models
    training = name.endswith(TRAINING)
    name = name.removesuffix(TRAINING)
    builder = inspect.signature(models.get_model_builder(name)).parameters
    given = {"weights_backbone": None} if "weights_backbone" in builder else {}
    if "optical_flow" not in models.get_model_builder(name).__module__:
        given["num_classes"] = CLASSES
    taken = inspect.signature(type(models.get_model(name, **given)).__init__).parameters
    few = {n: v for n in taken for pattern, v in FEW if re.fullmatch(pattern, n)}
    first: Exception | None = None
    for by, shallow, fewer in itertools.product((8, 4, 2, 1), (True, False), (few, {})):
        try:
            with narrowed(by):
                model = models.get_model(name, **given, **fewer)
            if shallow:
                shallower(model)
            model.train(training)
            for module in model.modules():
                if hasattr(module, "_skip_resize"):  # else the size of pictures is drawn
                    module._skip_resize = training
        except Exception as failed:  # noqa: BLE001 (other widths or arguments may fit)
            first = first or failed
            continue
        for kwargs in torchvision_inputs(model):
            try:
                model(**kwargs)
                return model, kwargs
            except Exception as failed:  # noqa: BLE001 (other arguments may fit)
                first = first or failed
    raise first or TypeError("no arguments")


def targets(sides: list[int]) -> list[dict[str, Tensor]]:
    """Two boxes in each picture, with the masks and points that detectors of these take."""
    corners = torch.tensor([[0.1, 0.1, 0.6, 0.5], [0.3, 0.4, 0.9, 0.9]])
    made = []
    for side in sides:
        boxes = corners * side
        middles = (boxes[:, :2] + boxes[:, 2:]) / 2
        masks = torch.zeros(len(boxes), side, side, dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist()):
            mask[top:bottom, left:right] = 1
        points = torch.cat([middles, torch.ones(len(boxes), 1)], 1)[:, None].expand(-1, POINTS, 3)
        numbers = {"labels": torch.arange(1, 1 + len(boxes)), "keypoints": points.clone()}
        made.append({"boxes": boxes, "masks": masks, **numbers})
    return made


def torchvision_inputs(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield arguments by their names: the smallest pictures and videos first."""
    names = inspect.signature(model.forward).parameters
    torch.manual_seed(0)
    if "images" in names:
        sides = [SIDE, SIDE - 8]
        images = {"images": [torch.rand(3, side, side) for side in sides]}
        yield images | ({"targets": targets(sides)} if model.training else {})
    elif "image1" in names:
        pictures = {n: torch.randn(BATCH, 3, 2 * SIDE, 2 * SIDE) for n in ("image1", "image2")}
        yield {**pictures, "num_flow_updates": 2}
    else:
        for frames, side in itertools.product(((), (4,), (16,)), (SIDE, 96, 224)):
            yield {next(iter(names)): torch.randn(BATCH, 3, *frames, side, side)}
