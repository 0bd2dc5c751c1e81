"""Metrics over batches of a mesh, with rows that fill up the last one, against one process."""

import copy
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import distributed
from torch import nn
from torch.distributed.tensor import DTensor

import torchgspmd as gspmd
from torchgspmd import evaluation
from torchgspmd.tools.evaluation import accuracy, error_rate, evaluate, mean_iou, perplexity

MESHES = ("data=2", "data=4", "data=2,model=2")


class Classifier(nn.Module):
    """x [b, 6] -> [b, 7]"""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 7)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


MEGATRON = {"up.weight": "model _", "up.bias": "model", "down.weight": "_ model"}


def wrapped(model, mesh, in_specs, out_specs=None, marks=None):
    model = copy.deepcopy(model)  # a copy has no marks
    if "model" in mesh.names and marks is not None:
        gspmd.annotate(model, mesh, marks)
    return gspmd.parallelize(model, mesh, in_specs=in_specs, out_specs=out_specs)


def batches(rows, size, *tensors):
    return [tuple(t[i : i + size] for t in tensors) for i in range(0, rows, size)]


@distributed(*MESHES)
def test_sizes_that_do_not_divide(mesh):
    """Counts to the last bit, sums to 1e-12; last batches have one to six rows of eight."""
    torch.set_default_dtype(torch.float64)
    one = Classifier()
    many = wrapped(one, mesh, "data _", marks=MEGATRON)
    metrics = {"top-1": accuracy(), "top-3": accuracy(3), "perplexity": perplexity()}
    for rows, size in ((22, 8), (9, 8), (3, 8), (16, 8)):
        x, y = torch.randn(rows, 6), torch.randint(7, (rows,))
        logits = one(x)
        top = logits.topk(3).indices == y[:, None]
        for pad in (True, False):
            scores = evaluate(many, batches(rows, size, x, y), metrics, pad=pad)
            assert scores["top-1"] == top[:, 0].sum().item() / rows
            assert scores["top-3"] == top.sum().item() / rows
            expected = F.cross_entropy(logits, y).exp().item()
            assert abs(scores["perplexity"] - expected) <= 1e-12 * expected
    assert many.training


@distributed(*MESHES)
def test_what_is_sent(mesh):
    """Nothing for a batch but what the model sends, and one all_reduce of 8 bytes a sum and 8."""
    one = Classifier()
    many = wrapped(one, mesh, "data _", marks=MEGATRON)
    data = batches(18, 8, torch.randn(18, 6), torch.randint(7, (18,)))
    evaluate(many, data, {"top-1": accuracy()})  # compiles
    programs = len(many._all_programs())
    with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as all_reduce:
        evaluate(many, data, {"top-1": accuracy(), "perplexity": perplexity()})
    assert [call.args[0].nbytes for call in all_reduce.call_args_list] == [5 * 8]
    assert len(many._all_programs()) == programs == 1
    kinds = [c.kind for c in many.plan.collectives]
    assert kinds == (["all_reduce"] if "model" in mesh.names else []), many.plan
    with torch.no_grad():
        assert not isinstance(many(torch.randn(8, 6)), DTensor)  # calls are as before


@distributed("rows=2", "data=2,rows=2")
def test_maps_in_parts(mesh):
    """Intersection and union of maps whose rows are sharded, too; 5 rows, which 2 do not divide."""
    one = nn.Conv2d(2, 4, 3, padding=1)
    many = wrapped(one, mesh, "data _ rows _" if "data" in mesh.names else "_ _ rows _")
    x, y = torch.randn(7, 2, 5, 6), torch.randint(3, (7, 5, 6))
    y[0, 0] = -100
    scores = evaluate(many, batches(7, 4, x, y), {"mean IoU": mean_iou(4)})
    best, real = one(x).argmax(1), y != -100
    shares = []
    for c in range(4):
        found, there = (best == c) & real, y == c
        shares.append((found & there).sum().item() / (found | there).sum().item())
    assert abs(scores["mean IoU"] - sum(shares) / 4) <= 1e-15
    assert {c.kind for c in many.plan.collectives} == {"permute"}


def words(outputs, targets):
    """outputs [t, b]"""
    return zip(outputs.T.tolist(), targets.tolist())


@distributed("data=2", "time=2,data=2")
def test_sequences(mesh):
    """The batch is dimension 1 of the outputs, and dimension 0 may be sharded."""
    spec = "time data" if "time" in mesh.names else "_ data"
    many = wrapped(nn.Identity(), mesh, None)
    said = torch.randint(4, (5, 6))
    heard = torch.where(torch.rand(5, 6) < 0.3, 9, said)
    for real in (None, torch.arange(5) < 3):
        meter = evaluation.Meter({"wer": error_rate(words, whole=(0,))})
        outputs = gspmd.parallelize(nn.Identity(), mesh, in_specs=spec, out_specs=spec)(heard.T)
        assert isinstance(outputs, DTensor)
        meter.update(outputs, said, real=real)
        count = 5 if real is None else 3
        wrong = (heard != said)[:count].sum().item()
        assert meter.compute() == {"wer": wrong / (6 * count)}
        with pytest.raises(gspmd.ShardingError, match="outputs of one batch are on None"):
            meter.update(heard.T, said)
        meter.reset()
        meter.update(many(heard.T), said, real=real)  # plain tensors
        assert meter.compute() == {"wer": wrong / (6 * count)}


@distributed("data=2", "data=2,model=2")
def test_rows_that_every_process_loads(mesh):
    """Process i has 5 - i rows, filled up to 5: others than the last ones are not real."""
    one = Classifier()
    many = wrapped(one, mesh, None, "data _", MEGATRON)
    i = mesh.coordinates(dist.get_rank())["data"]
    x, y = torch.randn(2, 5, 6), torch.randint(7, (2, 5))
    own, real = evaluation.pad_rows((x[i][: 5 - i], y[i][: 5 - i]), 5)
    images, labels, real = (
        gspmd.shard_batch(t, mesh, spec)
        for t, spec in zip((*own, real), ("data _", "data", "data"))
    )
    meter = evaluation.Meter({"top-1": accuracy()})
    meter.update(many(images), labels, real=real)
    right = sum((one(x[i]).argmax(1) == y[i])[: 5 - i].sum().item() for i in (0, 1))
    assert meter.compute() == {"top-1": right / 9}


@distributed("data=2,model=2")
def test_classes_that_are_sharded(mesh):
    """Outputs whose classes are sharded are gathered along that axis alone."""
    one = nn.Linear(6, 7, bias=False)
    many = wrapped(one, mesh, "data _", "data model", {"weight": "model _"})
    x, y = torch.randn(5, 6), torch.randint(7, (5,))
    scores = evaluate(many, [(x, y)], {"top-2": accuracy(2)})
    assert scores == {"top-2": (one(x).topk(2).indices == y[:, None]).any(1).sum().item() / 5}


@distributed("data=2,model=2")
def test_errors(mesh):
    many = wrapped(Classifier(), mesh, "data _")
    x, y = torch.randn(8, 6), torch.randint(7, (8,))
    with pytest.raises(gspmd.ShardingError, match="does not have the 8 rows of dimension 0"):
        evaluate(many, [(x, x, y)], {"a": accuracy()}, call=lambda m, x, *_: (m(x), y[:4]))
    with pytest.raises(gspmd.ShardingError, match=r"shapes \[8, 6\], \[4\]"):
        evaluate(many, [(x, y[:4])], {"a": accuracy()})
    first = dist.get_rank() == 0
    match = "returned sums of shape" if first else r"has failed on 1 of 4 processes"
    with pytest.raises(gspmd.ShardingError, match=match):
        wrong = evaluation.Metric(lambda outputs, targets: outputs.sum())
        evaluate(many, [(x[:1], y[:1])], {"a": wrong})
    with pytest.raises(gspmd.ShardingError, match="metric 'a' is a float"):
        evaluate(many, [(x, y)], {"a": 0.5})


@pytest.mark.skipif(find_spec("torchmetrics") is None, reason="torchmetrics is not installed")
@distributed("data=4", "data=2,model=2")
def test_torchmetrics(mesh):
    """Its metrics get the rows of this device, each once, and add up by themselves."""
    from torchmetrics import classification

    one = Classifier()
    many = wrapped(one, mesh, "data _", marks=MEGATRON)
    x, y = torch.randn(9, 6), torch.randint(7, (9,))

    def fresh():
        return {
            "accuracy": classification.MulticlassAccuracy(7, average="micro"),
            "confusion": classification.MulticlassConfusionMatrix(7),
            "auroc": classification.MulticlassAUROC(7, average="macro"),  # keeps all rows
        }

    scores = evaluate(many, batches(9, 8, x, y), fresh())
    plain = evaluate(one, batches(9, 8, x, y), fresh() | {})
    assert torch.equal(scores["confusion"], plain["confusion"])
    for name in ("accuracy", "auroc"):
        torch.testing.assert_close(scores[name], plain[name])
