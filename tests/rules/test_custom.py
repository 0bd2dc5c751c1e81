"""Rules for operations of one's own."""

from __future__ import annotations

import pytest
import torch
from helpers import MESHES, assert_same, message

import torchgspmd as gspmd


@torch.library.custom_op("torchgspmd_tests::distance", mutates_args=())
def distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x[b, i, k], y[b, j, k] -> [b, i, j]."""
    return (x.unsqueeze(2) - y.unsqueeze(1)).square().sum(-1)


@distance.register_fake
def _(x, y):
    return x.new_empty(x.shape[0], x.shape[1], y.shape[1])


@torch.library.custom_op("torchgspmd_tests::peaks", mutates_args=())
def peaks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.amax(-1), x * 2


@peaks.register_fake
def _(x):
    return x.new_empty(x.shape[:-1]), torch.empty_like(x)


X, Y = (torch.randn(4, n, 50, generator=torch.Generator().manual_seed(n)) for n in (6, 7))


@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_it_runs_partitioned(mesh):
    gspmd.rule(distance, "b i k, b j k -> b i j", reduce="k")
    for specs in (("m _ _", None), ("_ m _", None), (None, "_ m _"), ("_ _ m", "_ _ m")):
        plan = gspmd.plan(distance, X, Y, mesh=mesh, in_specs=specs)
        assert_same(plan.simulate(X, Y, _poison=True), distance(X, Y))
        assert plan.replicated_ops == ()


def test_by_name_with_a_maximum_and_leading_dimensions():
    mesh = gspmd.Mesh(m=3)
    gspmd.rule("torchgspmd_tests::peaks", "... k -> ..., ... k", reduce={"k": "max"})
    for spec in ("m _ _", "_ m _", "_ _ m"):
        plan = gspmd.plan(peaks, X, mesh=mesh, in_specs=spec)
        assert_same(plan.simulate(X, _poison=True), peaks(X))
        assert plan.replicated_ops == ()


def test_without_a_rule_it_runs_whole():
    @torch.library.custom_op("torchgspmd_tests::unknown", mutates_args=())
    def unknown(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0)

    unknown.register_fake(torch.empty_like)
    plan = gspmd.plan(unknown, X, mesh=gspmd.Mesh(m=2), in_specs="m _ _")
    assert_same(plan.simulate(X, _poison=True), unknown(X))
    assert [r.why for r in plan.replicated_ops] == ["no rule and no decomposition"]


@pytest.mark.parametrize(
    "arguments, text",
    [
        (("b k", {}), "rule 'b k' needs exactly one '->'"),
        (("b k -> b", {"reduce": "j"}), "'j' is no factor of the rule 'b k -> b'"),
        (("b k -> b", {"whole": "j"}), "'j' is no factor of the rule 'b k -> b'"),
        (
            ("b k -> b", {"reduce": {"k": "median"}}),
            "'median' is not a reduction; use one of sum, max, min, prod",
        ),
        (("b b -> b", {}), "'b b' in rule 'b b -> b' has a factor twice"),
    ],
)
def test_a_wrong_rule_is_one_sentence(arguments, text):
    sentence, keywords = arguments
    assert message(lambda: gspmd.rule(distance, sentence, **keywords)).splitlines()[0] == text


def test_a_rule_that_does_not_fit_the_call():
    gspmd.rule(distance, "b i k -> b i k")
    assert message(lambda: gspmd.plan(distance, X, Y, mesh=gspmd.Mesh(m=2))).splitlines()[0] == (
        "the rule 'b i k -> b i k' does not fit a call of torchgspmd_tests.distance.default"
    )


def test_what_has_a_rule_keeps_it():
    assert (
        message(lambda: gspmd.rule(torch.ops.aten.sin, "a -> a")).splitlines()[0]
        == "aten.sin.default has a rule already"
    )
    assert "is no operation" in message(lambda: gspmd.rule(torch.sin, "a -> a"))


@torch.library.custom_op("torchgspmd_tests::scale_channels", mutates_args=())
def scale_channels(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None = None
) -> torch.Tensor:
    shape = (-1, *[1] * (x.dim() - 2))
    return x * scale.reshape(shape) + (0 if shift is None else shift.reshape(shape))


@scale_channels.register_fake
def _(x, scale, shift=None):
    return torch.empty_like(x)


def test_the_first_sentence_that_fits_a_call_counts():
    gspmd.rule(
        scale_channels,
        ["n c, c -> n c", "n c h w, c -> n c h w", "n c h w, c, c -> n c h w"],
    )
    mesh, c = gspmd.Mesh(m=2, k=2), torch.randn(6)
    for arguments, spec in (
        ((torch.randn(4, 6), c), "m k"),
        ((torch.randn(4, 6, 4, 2), c), "m _ k _"),
        ((torch.randn(4, 6, 4, 2), c, c + 1), "m k _ _"),
    ):
        specs = (spec, *[None] * (len(arguments) - 1))
        plan = gspmd.plan(scale_channels, *arguments, mesh=mesh, in_specs=specs)
        assert not plan.replicated_ops and not plan.collectives
        assert_same(plan.simulate(*arguments), scale_channels(*arguments))
    x = torch.randn(4, 6, 3)
    text = message(lambda: gspmd.plan(scale_channels, x, c, mesh=mesh))
    assert "does not fit a call" in text and "rule(op, [sentence, ...])" in text
