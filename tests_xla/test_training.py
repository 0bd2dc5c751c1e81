"""Training on XLA: the losses of one device, one program a step, layouts that stay."""

import pytest
import torch
from programs import (
    DIGITS,
    EVEN,
    LAYOUTS,
    MESH,
    UNEVEN,
    UNEVEN_DIGITS,
    ConvNet,
    MoE,
    adam,
    furthest,
    gpt,
    groups,
    images,
    on_both,
    pictures,
    primed,
    texts,
    train,
    vit,
)
from vit.model import LAYOUTS as VIT_LAYOUTS

from torchgspmd.xla_backend.runtime import sync
from torchgspmd.xla_backend.sharding import device_order, layout_text, text_of


class Watch:
    """What XLA compiled and ran in every step, and whether all tensors of the training lie as
    marked.
    """

    def __init__(self, model, optimizer):
        import torch_xla.core.xla_model as xm
        import torch_xla.debug.metrics as met

        self.model, self.optimizer, self.met, self.wait = model, optimizer, met, xm.wait_device_ops
        self.compiled, self.ran, self.fallbacks = [], [], set()
        sync()  # what other tests have left is not counted,
        self.wait()  # nor what has begun before
        met.clear_all()

    def __call__(self, step: int) -> None:
        self.wait()
        count = {
            name: (self.met.metric_data(name) or (0,))[0]
            for name in ("CompileTime", "UncachedCompile", "ExecuteReplicatedTime")
        }
        self.compiled.append(count["CompileTime"] + count["UncachedCompile"])
        self.ran.append(count["ExecuteReplicatedTime"])
        self.fallbacks |= {
            name for name in self.met.counter_names() if name.startswith("aten::")
        } - {"aten::_local_scalar_dense"}
        self.check_layouts()
        self.met.clear_all()

    def check_layouts(self) -> None:
        order = tuple(device_order())
        for name, parameter in self.model.named_parameters():
            wanted = text_of(self.model._specs[name], MESH, order)
            state = [
                t for t in self.optimizer.state[parameter].values() if t.shape == parameter.shape
            ]
            assert {layout_text(t) for t in (parameter, parameter.grad, *state)} == {wanted}, name


TRANSFORMERS = {
    **{
        f"gpt {layout}": lambda even, *args, layout=layout: gpt(
            layout, EVEN if even else UNEVEN, *args
        )
        for layout in LAYOUTS
    },
    **{
        f"vit {layout}": lambda even, *args, layout=layout: vit(
            layout, DIGITS if even else UNEVEN_DIGITS, *args
        )
        for layout in VIT_LAYOUTS
    },
}


def batches(name: str, even: bool, steps: int, dtype: torch.dtype):
    return (
        texts(EVEN if even else UNEVEN, steps)
        if name.startswith("gpt")
        else pictures(DIGITS if even else UNEVEN_DIGITS, steps, dtype)
    )


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_in_float64(name):
    model, reference = on_both(TRANSFORMERS[name](True, torch.float64))
    watch = compare(
        name, True, torch.float64, 4, (model, adam(model)), (reference, adam(reference)), 1e-8
    )
    assert watch.compiled[2:] == [
        0,
        0,
    ]  # the first step makes the optimizer's state, the second has it as input


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_of_uneven_sizes_in_float64(name):
    model, reference = on_both(TRANSFORMERS[name](False, torch.float64))
    watch = compare(
        name,
        False,
        torch.float64,
        4,
        (model, primed(adam(model))),
        (reference, primed(adam(reference))),
        1e-8,
    )
    assert watch.compiled[1:] == [0, 0, 0]


def compare(
    name: str,
    even: bool,
    dtype: torch.dtype,
    steps: int,
    mine: tuple,
    theirs: tuple,
    tolerance: float,
) -> Watch:
    """Trains both (model, optimizer): equal losses and weights, one program a step, nothing
    computed by the host.
    """
    watch = Watch(*mine)
    losses = train(mine[0], batches(name, even, steps, dtype), mine[1], watch)
    assert (
        furthest(losses, train(theirs[0], batches(name, even, steps, dtype), theirs[1]))
        <= tolerance
    )
    assert watch.ran == [1] * steps and not watch.fallbacks
    for (name, got), want in zip(mine[0].named_parameters(), theirs[0].parameters()):
        assert (got.detach().cpu() - want).abs().max() <= 1e-6 * want.abs().max(), name
    return watch


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_in_float32(name, even):
    """Of one layer: twenty steps are to show that rounding does not grow."""
    model, reference = on_both(TRANSFORMERS[name](even, torch.float32, 1))
    losses = train(model, batches(name, even, 20, torch.float32), primed(adam(model)))
    assert (
        furthest(
            losses,
            train(reference, batches(name, even, 20, torch.float32), primed(adam(reference))),
        )
        <= 1e-4
    )


@pytest.mark.parametrize("size", [(16, 16), (13, 10)])
def test_a_conv_net_with_sharded_rows(size):
    torch.manual_seed(0)
    model, reference = on_both(ConvNet(MESH).double())
    losses = train(model, images(torch.float64, 4, size), adam(model))
    assert (
        furthest(losses, train(reference, images(torch.float64, 4, size), adam(reference))) <= 1e-8
    )
    for (name, got), want in zip(model.named_buffers(), reference.buffers()):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize("count", [8, 6])
def test_a_mixture_of_experts(count):
    torch.manual_seed(0)
    model, reference = on_both(MoE(MESH).double())
    losses = train(model, groups(torch.float64, 4, count), adam(model))
    assert (
        furthest(losses, train(reference, groups(torch.float64, 4, count), adam(reference))) <= 1e-8
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
        lambda p: torch.optim.Adagrad(p, lr=1e-2),
        lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5),
        lambda p: torch.optim.Adadelta(p),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.Adamax(p),
        lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    ],
    ids=["SGD", "Adam", "Adagrad", "RMSprop", "Adadelta", "NAdam", "Adamax", "AdamW"],
)
def test_optimizers(optimizer):
    torch.manual_seed(0)
    model, reference = on_both(MoE(MESH).double())
    losses = train(model, groups(torch.float64, 3), optimizer(model.parameters()))
    assert (
        furthest(
            losses, train(reference, groups(torch.float64, 3), optimizer(reference.parameters()))
        )
        <= 1e-8
    )


def test_a_schedule_and_clipping_compile_nothing():
    model, reference = on_both(gpt("tp", EVEN))

    def run(module, watch=lambda step: None):
        optimizer, losses = adam(module), []
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        for step, batch in enumerate(texts(EVEN, 5)):
            loss = module(*batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            watch(step)
            optimizer.zero_grad()
        return losses

    watch = Watch(model, torch.optim.SGD(model.parameters(), lr=0.0))
    watch.check_layouts = lambda: None
    assert furthest(run(model, watch), run(reference)) <= 1e-5
    assert watch.compiled[2:] == [0, 0, 0] and watch.ran == [1] * 5


def test_accumulated_gradients():
    model, reference = on_both(gpt("fsdp", EVEN, torch.float64))
    for module in (model, reference):
        for batch in texts(EVEN, 3):
            module(*batch).backward()
    sync()  # one program, not one for each gradient that is read
    for (name, got), want in zip(model.named_parameters(), reference.parameters()):
        assert (got.grad.cpu() - want.grad).abs().max() <= 1e-8 * max(
            want.grad.abs().max(), 1e-6
        ), name


def test_microbatches():
    """A part after the other in the program, which has no loop on XLA."""
    model, reference = on_both(gpt("fsdp", EVEN, torch.float64), microbatches=2)
    for batch in texts(EVEN, 2):
        for module in (model, reference):
            module.zero_grad()
            loss = module(*batch)
            loss.backward()
        sync()
        for (name, got), want in zip(model.named_parameters(), reference.parameters()):
            assert (got.grad.cpu() - want.grad).abs().max() <= 1e-8 * max(
                want.grad.abs().max(), 1e-6
            ), name
