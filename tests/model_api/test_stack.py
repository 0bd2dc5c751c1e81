"""stack(): loss and gradients of the loop over the blocks, size of the program, names, errors."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import scan
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torchgspmd as gspmd
from torchgspmd.fx_passes.loop_call import loop_calls
from torchgspmd.rules.custom_ops.loops import STACK

EXACT = {"rtol": 1e-10, "atol": 1e-12}  # float64
MESH = gspmd.Mesh(data=2, model=2)
TENSOR_PARALLEL = {"up.weight": "model _", "up.bias": "model", "down.weight": "_ model"}
FULLY_SHARDED = {"up.weight": "data _", "up.bias": "data", "down.weight": "_ data"}


class Block(nn.Module):
    def __init__(self, width=4, hidden=6, dropout=0.0):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), dropout
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x, scale=None):
        y = self.down(F.gelu(self.up(self.norm(x))))
        y = F.dropout(y, self.dropout) if self.dropout else y
        return x + (y if scale is None else y * scale)


class Model(nn.Module):
    def __init__(self, blocks, **options):
        super().__init__()
        self.blocks = gspmd.stack(blocks, **options)

    def forward(self, x, scale=None):
        return self.blocks(x, scale).square().mean()


def blocks_of(count, marks=None, **options):
    torch.manual_seed(0)
    blocks = [Block(**options).double() for _ in range(count)]
    for block in blocks:
        gspmd.annotate(block, MESH, marks or {})
        with torch.no_grad():
            for parameter in block.parameters():
                parameter += 0.3 * torch.randn_like(parameter)  # vectors differ between blocks
    return blocks


@pytest.mark.parametrize(
    "marks, recompute", ((TENSOR_PARALLEL, False), (FULLY_SHARDED, False), (TENSOR_PARALLEL, True))
)
def test_loss_and_gradients(marks, recompute):
    blocks = blocks_of(5, marks)
    x, scale = torch.randn(4, 3, 4, dtype=torch.double), torch.rand(4, dtype=torch.double)
    y = x
    for block in blocks:
        y = block(y, scale)
    loss = y.square().mean()
    loss.backward()
    model = Model(blocks, recompute=recompute)
    torch.testing.assert_close(model(x, scale), loss, **EXACT)  # on one device: a loop
    plan = gspmd.plan(model, x, scale, mesh=MESH, in_specs=("data _ _", None), grad=True)
    result, gradients = plan.simulate(x, scale)
    torch.testing.assert_close(result, loss.detach(), **EXACT)
    for layer, block in enumerate(blocks):
        for name, parameter in block.named_parameters():
            gradient = gradients[f"blocks.block.{name}"][layer]
            torch.testing.assert_close(gradient, parameter.grad, **EXACT)


def test_the_program_has_the_size_of_one_block():
    """A block of 64 is planned as one of 2 is: the marks of the blocks are those of the rows."""

    def size(graph):
        return len(graph.nodes) + sum(size(call.graph) for _, call in loop_calls(graph))

    x = torch.empty(64, 32, 16, dtype=torch.double, device="meta")
    for dropout in (0.0, 0.1):
        sizes, sent = [], []
        for count in (2, 64):
            model = Model(blocks_of(count, TENSOR_PARALLEL, dropout=dropout, width=16))
            plan = gspmd.plan(model, x, mesh=MESH, in_specs="data _ _", grad=True)
            sizes.append(size(plan.program.graph))
            sent.append(plan.sent_bytes)
        assert sizes[0] == sizes[1] < 160
        assert sent[1] < 32.1 * sent[0]


def test_recompute_keeps_what_passes_from_block_to_block():
    x, count = torch.empty(64, 32, 16, dtype=torch.double, device="meta"), 8
    saved = []
    for recompute in (False, True):
        model = Model(blocks_of(count, TENSOR_PARALLEL, width=16), recompute=recompute)
        plan = gspmd.plan(model, x, mesh=MESH, in_specs="data _ _", grad=True)
        saved.append(plan.report().memory.saved)
    passed = 64 // 2 * 32 * 16 * 8  # bytes of what a block returns
    assert (
        (count + 1) * passed
        <= saved[1]
        < (count + 4) * passed
        < 2 * (count + 2) * passed
        < saved[0]
    )


class CheckpointedBlock(Block):
    """The product with `up` and what follows it are computed again."""

    def forward(self, x, scale=None):
        def part(y):
            return torch.tanh(torch.tanh(F.gelu(self.up(y)))) @ self.down.weight.T

        return x + checkpoint(part, self.norm(x), use_reentrant=False, **self.options)


def _saves_products(context, op, *args, **kwargs):
    is_product = "einsum" in str(op) or op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def test_a_checkpoint_in_a_block_keeps_what_it_takes_and_what_its_policy_saves():
    selective = partial(create_selective_checkpoint_contexts, _saves_products)
    x = torch.randn(4, 3, 4, dtype=torch.double)
    stacked = {}
    for kind, options in (("all", {}), ("selective", {"context_fn": selective})):
        torch.manual_seed(0)
        CheckpointedBlock.options = options
        blocks = [CheckpointedBlock(hidden=64).double() for _ in range(3)]
        loss = nn.Sequential(*blocks)(x).square().mean()
        loss.backward()
        plan = gspmd.plan(Model(blocks), x, mesh=MESH, in_specs="data _ _", grad=True)
        result, gradients = plan.simulate(x)
        torch.testing.assert_close(result, loss.detach(), **EXACT)
        for layer, block in enumerate(blocks):
            expected = block.up.weight.grad
            torch.testing.assert_close(
                gradients["blocks.block.up.weight"][layer], expected, **EXACT
            )
        stacks = plan.sharded.find_nodes(op="call_function", target=STACK)
        stacked[kind] = sum(n.meta["val"].shape[-1] == 64 for n in stacks if _is_kept(n))
    assert stacked == {"all": 0, "selective": 1}


def _is_kept(stack):
    """Return whether a loop stacks a value of its blocks for the backward."""
    return not stack.meta["backward"] and stack.meta["val"].dim() == 4


@pytest.mark.parametrize("recompute", (False, True))
def test_each_block_drops_others(recompute):
    """The numbers are those of one device, and gradients are those of the values that are left."""
    x = torch.randn(4, 3, 4, dtype=torch.double)
    model = Model(blocks_of(3, dropout=0.5), recompute=recompute)

    def loss(plan, x):
        torch.manual_seed(7)
        return plan.simulate(x)

    alone = gspmd.plan(model, x, mesh=gspmd.Mesh(data=1), grad=True)
    plan = gspmd.plan(model, x, mesh=MESH, in_specs="data _ model", grad=True)
    expected, expected_gradients = loss(alone, x)
    result, gradients = loss(plan, x)
    torch.testing.assert_close(result, expected, **EXACT)
    torch.testing.assert_close(gradients, expected_gradients, **EXACT)
    weight, step = model.get_parameter("blocks.block.down.weight"), 1e-6
    direction = torch.randn_like(weight)
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * step * direction
            ends.append(loss(plan, x)[0])
            weight -= sign * step * direction
    slope = (gradients["blocks.block.down.weight"] * direction).sum()
    torch.testing.assert_close((ends[0] - ends[1]) / (2 * step), slope, rtol=1e-6, atol=1e-8)
    identity = gspmd.stack([nn.Dropout(0.5), nn.Dropout(0.5)])
    kept = gspmd.plan(identity, torch.ones(999), mesh=MESH).simulate(torch.ones(999))
    assert {*kept.tolist()} == {0.0, 4.0} and 150 < kept.count_nonzero() < 350  # a quarter


@pytest.mark.filterwarnings("ignore")
def test_blocks_in_a_loop_over_microbatches():
    """A scale of all blocks is used in both loops. Gradients are reduced once, after both."""
    blocks, mesh = blocks_of(3), gspmd.Mesh(data=2)
    alone = copy.deepcopy(blocks)

    class Accumulated(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = gspmd.stack(blocks)
            self.scale = nn.Parameter(torch.rand(4, dtype=torch.double))

        def forward(self, x):  # [microbatches, rows, width]
            def microbatch(total, row):
                return total + self.blocks(row, self.scale).square().sum(), row.sum()

            return scan(microbatch, x.new_zeros(()), x)[0]

    model, x = Accumulated(), torch.randn(3, 64, 4, dtype=torch.double)
    plan = gspmd.plan(model, x, mesh=mesh, in_specs="_ data _", grad=True)
    assert plan.sent_bytes == 8 * (1 + sum(p.numel() for p in model.parameters()))
    loss, gradients = plan.simulate(x)
    y, scale = x, model.scale.detach().requires_grad_()
    for block in alone:
        y = block(y, scale)
    y.square().sum().backward()
    torch.testing.assert_close(loss, y.square().sum().detach(), **EXACT)
    torch.testing.assert_close(gradients["scale"], scale.grad, **EXACT)
    for layer, block in enumerate(alone):
        gradient = gradients["blocks.block.up.weight"][layer]
        torch.testing.assert_close(gradient, block.up.weight.grad, **EXACT)


def test_names_of_the_blocks():
    blocks = blocks_of(3)
    names, model = nn.ModuleList(copy.deepcopy(blocks)).state_dict(), gspmd.stack(blocks)
    state = model.state_dict()
    assert state.keys() == names.keys()
    assert all(torch.equal(state[name], value) for name, value in names.items())
    other = gspmd.stack(Block().double() for _ in range(3))
    other.load_state_dict(names)
    for one, two in zip(model.parameters(), other.parameters()):
        assert torch.equal(one, two)


def test_marks_after_stacking_by_the_names_of_the_blocks():
    before, after = (Model(blocks_of(3, marks)) for marks in (TENSOR_PARALLEL, None))
    gspmd.annotate(after, MESH, {f"blocks.*.{name}": s for name, s in TENSOR_PARALLEL.items()})
    plans = [gspmd.plan(m, torch.ones(4, 4).double(), mesh=MESH) for m in (before, after)]
    assert plans[0].in_specs == plans[1].in_specs
    with pytest.raises(gspmd.ShardingError, match="'blocks.1.up.weight' has another layout"):
        gspmd.annotate(after, MESH, {"blocks.1.up.weight": "_ model"})


def test_errors():
    with pytest.raises(gspmd.ShardingError, match="a stack has no blocks"):
        gspmd.stack([])
    with pytest.raises(gspmd.ShardingError, match="blocks 0 and 1 of a stack differ"):
        gspmd.stack([nn.Linear(4, 4), nn.Linear(4, 5)])
    with pytest.raises(gspmd.ShardingError, match="a stack is made of stacked blocks"):
        gspmd.stack([gspmd.stack([nn.Linear(4, 4)])])
    with pytest.raises(
        gspmd.ShardingError, match=r"takes float32\[2, 4\] and returns float32\[2, 5\]"
    ):
        gspmd.plan(gspmd.stack([nn.Linear(4, 5), nn.Linear(4, 5)]), torch.ones(2, 4), mesh=MESH)
