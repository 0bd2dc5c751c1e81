"""torch.distributed.checkpoint's own helpers on two processes: its comparison of state_dicts, its
stream extension, its models that rename their state. Layouts differ between writer and reader.
"""

from __future__ import annotations

import unittest

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import assert_same
from ranks import distributed
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch_models import MODELS, make, train, wrapped

import torchgspmd as gspmd

state_dicts = pytest.importorskip(
    "torch.testing._internal.distributed.common_state_dict", reason="torch ships no such helper"
)
files = pytest.importorskip(
    "torch.testing._internal.distributed.checkpoint_utils", reason="torch ships no such helper"
)
FUSED = ("FusionEmbedding", "FusionEmbeddingWithHook", "FusionEmbeddingWithModifier")


class Verify(state_dicts.VerifyStateDictMixin, unittest.TestCase):
    """torch's comparison of a state_dict with one of a sharded model."""


def pair(mesh: gspmd.Mesh, name: str) -> tuple[nn.Module, nn.Module]:
    alone = make(name)
    return wrapped(alone, mesh, name), alone


def whole(model: nn.Module) -> dict:
    """Return a copy of the state of a model on a mesh, or of one device."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


@distributed("model=2")
@pytest.mark.parametrize("name", MODELS)
def test_model_state(mesh, name):
    model, alone = pair(mesh, name)
    next(model.parameters()).requires_grad_(False)
    for options in (
        StateDictOptions(),
        StateDictOptions(full_state_dict=True),
        StateDictOptions(cpu_offload=True),
        StateDictOptions(ignore_frozen_params=True),
    ):
        if options.ignore_frozen_params:
            next(alone.parameters()).requires_grad_(False)
        got = get_model_state_dict(model, options=options)
        Verify()._verify_msd(get_model_state_dict(alone), got, options)


@distributed("model=2")
@pytest.mark.parametrize("name", MODELS)
def test_optimizer_state(mesh, name):
    model, alone = pair(mesh, name)
    other = train(alone, name)
    ours = train(model, name)
    got = get_optimizer_state_dict(model, ours)
    Verify()._verify_osd(alone, other, other.state_dict(), got)
    new = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    set_state_dict(model, new, model_state_dict={}, optim_state_dict=got)
    again = get_optimizer_state_dict(model, new)
    for key, state in got["state"].items():
        assert all(v.equal(again["state"][key][n]) for n, v in state.items()), key


@distributed("model=2")
@pytest.mark.parametrize("name", MODELS)
def test_saved_and_resharded(mesh, name):
    @files.with_temp_dir
    def check(self):
        model, alone = pair(mesh, name)
        optimizer = train(model, name)
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=self.temp_dir)
        for reader in (wrapped(make(name), mesh, name + " read"), make(name)):
            own = torch.optim.AdamW(reader.parameters(), 1e-2, eps=1e-3)
            weights, state = get_state_dict(reader, own)
            content = {"model": weights, "optimizer": state}
            dcp.load(content, checkpoint_id=self.temp_dir)
            set_state_dict(
                reader,
                own,
                model_state_dict=content["model"],
                optim_state_dict=content["optimizer"],
            )
            assert_same(whole(reader), whole(model), name, terms=0)
            train(reader, name, 1, own)
            results.append(whole(reader))
        dist.barrier()
        assert_same(results[0], results[1], name, terms=4096)

    results: list[dict] = []
    check(unittest.TestCase())


@distributed("model=2")
def test_stream_extensions(mesh):
    """A file that an extension encodes is read back, by another layout too."""

    @files.with_temp_dir
    def check(self):
        model, alone = pair(mesh, "MLPModule")
        writer = dcp.FileSystemWriter(self.temp_dir, _extensions=[files.Rot13Example()])
        dcp.save({"model": model.state_dict()}, storage_writer=writer)
        reader = wrapped(make("MLPStacked").layers[0], mesh, "other")
        state = {"model": reader.state_dict()}
        registry = files.get_test_extension_registry()
        dcp.load(
            state,
            storage_reader=dcp.FileSystemReader(self.temp_dir, _extension_registry=registry),
        )
        set_model_state_dict(reader, state["model"])
        assert_same(whole(reader), dict(alone.state_dict()), terms=0)
        dist.barrier()

    check(unittest.TestCase())


@distributed("model=2")
@pytest.mark.parametrize("name", FUSED)
def test_renamed_state(mesh, name):
    """Hooks that rename a state_dict's keys do so for a sharded model, when it is loaded too."""
    alone = getattr(state_dicts, name)(8, 4, 6)
    model = wrapped(alone, mesh, name)
    want = alone.state_dict()
    for state in (model.state_dict(), get_model_state_dict(model)):
        assert [*state] == [*want]
        Verify()._verify_msd(want, state)
    assert_same(whole(model), dict(want), name, terms=0)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state)
    assert_same(whole(model), dict(want), name, terms=0)
