"""pipeline(): loss and gradients of the loop over the blocks, bytes, names, errors."""

import copy

import pytest
import torch
import torch.nn.functional as F
from pipelined import check, with_pipeline
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgspmd as gspmd


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 6), nn.Linear(6, width)

    def forward(self, x, scale=None):
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + (y if scale is None else y * scale)


class Model(nn.Module):
    """Embedding and head are tied, outside of the pipeline; all blocks read a table."""

    def __init__(self, blocks):
        super().__init__()
        self.embed = nn.Parameter(torch.randn(5, 4))
        self.blocks = blocks

    def forward(self, tokens, scale=None):
        x = self.embed[tokens]
        if isinstance(self.blocks, nn.ModuleList):
            for block in self.blocks:
                x = block(x, scale)
        else:
            x = self.blocks(x, scale)
        return F.cross_entropy((x @ self.embed.T).flatten(0, 1), tokens.flatten())


def pair(count, mesh, microbatches, **options):
    """The model with a loop, and with a pipeline of the same weights."""
    torch.manual_seed(0)
    alone = Model(nn.ModuleList(Block() for _ in range(count))).double()
    model = with_pipeline(alone, mesh, microbatches=microbatches, **options)
    return alone, model


@pytest.mark.parametrize(
    "count, mesh, options",
    (
        (4, "stage=4", {"microbatches": 4}),
        (5, "stage=2", {"microbatches": 4, "recompute": True}),  # 3 blocks and 2
        (4, "stage=2", {"microbatches": 3, "repeats": 2}),
        (7, "stage=2,model=2", {"microbatches": 2, "repeats": 2}),
        (2, "data=2,stage=2", {"microbatches": 3}),
    ),
)
def test_loss_and_gradients(count, mesh, options):
    mesh = gspmd.Mesh.parse(mesh)
    alone, model = pair(count, mesh, **options)
    tokens, scale = torch.randint(5, (12, 3)), torch.rand(4, dtype=torch.float64)
    check(alone, model, mesh, tokens, scale)


def test_a_tick_sends_one_activation():
    mesh, m, p = gspmd.Mesh(stage=4), 8, 4
    with torch.device("meta"):
        blocks = [nn.Linear(512, 512) for _ in range(p)]
        x = torch.empty(8 * m, 512)
    plan = gspmd.plan(gspmd.pipeline(blocks, mesh, microbatches=m), x, mesh=mesh, grad=True)
    activation = 8 * 512 * 4
    shifts = 2 * (m + p - 2) * activation  # forward and backward
    results = 2 * m * activation  # from the last stage to all, and their gradients back
    assert plan.sent_bytes <= shifts + results
    assert not [c for c in plan.collectives if c.payload_bytes > m * activation]


def test_the_program_grows_neither_with_layers_nor_with_microbatches():
    """The layers of a stage are a loop in the loop of ticks; weights are reduced after both."""
    mesh, sizes = gspmd.Mesh(data=2, stage=2), {}
    for layers, m in ((2, 4), (8, 4), (2, 64)):
        with torch.device("meta"):
            blocks = [Block() for _ in range(2 * layers)]
            model = gspmd.pipeline(blocks, mesh, microbatches=m)
            x = torch.empty(2 * m, 4)
        plan = gspmd.plan(model, x, mesh=mesh, in_specs="data _", grad=True)
        sizes[layers, m] = len(plan.program.graph.nodes)
        reduced = [c for c in plan.collectives if c.kind == "all_reduce" and "data" in c.axes]
        assert reduced and all(c.count == 1 for c in reduced)
    assert max(sizes.values()) <= 1.02 * min(sizes.values()), sizes


def test_names_of_the_blocks():
    mesh = gspmd.Mesh(stage=2)
    alone, model = pair(5, mesh, 4)
    state = model.state_dict()
    assert state.keys() == alone.state_dict().keys()
    for name, value in alone.state_dict().items():
        assert torch.equal(state[name], value)
    _, other = pair(5, mesh, 4)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(state)
    for one, two in zip(model.parameters(), other.parameters()):
        assert torch.equal(one, two)
    with pytest.raises(RuntimeError, match="blocks"):
        other.load_state_dict({name: value for name, value in state.items() if "4.up" not in name})


def test_errors():
    mesh, blocks = gspmd.Mesh(stage=2), [Block(), Block()]
    with pytest.raises(gspmd.ShardingError, match="axis 'stages'.*(\n.*)*stage"):
        gspmd.pipeline(blocks, mesh, "stages", microbatches=2)
    with pytest.raises(gspmd.ShardingError, match="'1f1b' is used without a loss(\n.*)*loss=fn"):
        gspmd.pipeline(blocks, mesh, microbatches=2, schedule="1f1b")
    with pytest.raises(gspmd.ShardingError, match="no schedule '1b1f'(\n.*)*'1f1b'"):
        gspmd.pipeline(blocks, mesh, microbatches=2, schedule="1b1f")
    with pytest.raises(gspmd.ShardingError, match="'circular' is used with a loss"):
        gspmd.pipeline(blocks, mesh, microbatches=2, schedule="circular", loss=F.mse_loss)
    with pytest.raises(gspmd.ShardingError, match="'gpipe' is used with 2 repeats"):
        gspmd.pipeline(blocks, mesh, microbatches=2, schedule="gpipe", repeats=2)
    with pytest.raises(gspmd.ShardingError, match="blocks 0 and 1 of a pipeline differ"):
        gspmd.pipeline([Block(), Block(6)], mesh, microbatches=2)
    with pytest.raises(gspmd.ShardingError, match="1 microbatches"):
        gspmd.pipeline(blocks, mesh, microbatches=1, repeats=2)
    model = gspmd.pipeline(blocks, mesh, microbatches=3)
    with pytest.raises(gspmd.ShardingError, match="a batch of 4 is divided into 3"):
        gspmd.plan(model, torch.ones(4, 4), mesh=mesh)


def test_rows_of_arguments_go_with_their_microbatch():
    mesh = gspmd.Mesh(stage=2)
    alone, model = pair(3, mesh, 2, rows=("scale",), repeats=2)
    tokens, scale = torch.randint(5, (8, 3)), torch.rand(8, 1, 4, dtype=torch.float64)
    check(alone, model, mesh, tokens, scale)
    _, model = pair(2, mesh, 2)
    with pytest.raises(gspmd.ShardingError, match="'scale' .* has 8 rows(.*\n)*.*rows="):
        gspmd.plan(model, tokens, scale, mesh=mesh)
    _, model = pair(2, mesh, 2, rows=("scales",))
    with pytest.raises(gspmd.ShardingError, match="'scales'(.*\n)*.*did you mean 'scale'"):
        gspmd.plan(model, tokens, scale, mesh=mesh)


def test_a_loop_of_someone_else_calls_all_blocks_at_once():
    blocks = gspmd.stack(Block() for _ in range(3))
    assert len([*blocks]) == len(blocks[:3]) == len(blocks) == 3
    assert [*blocks][2].up is blocks.block.up  # attributes of the block that stands for all
    with pytest.raises(gspmd.ShardingError, match="a part of 3 stacked blocks"):
        blocks[:2]


LOOPS = {  # what one may not do in a loop over blocks
    "changed in place": lambda x, i, block: block(x).neg_(),
    "skipped": lambda x, i, block: x if i == 1 else block(x),
    "called twice": lambda x, i, block: (block(x), block(x))[0],
    "read": lambda x, i, block: block(x) if i == 0 or x.sum() < 1e9 else x,
    "other number": lambda x, i, block: block(x, float(i + 1)),
}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x, scale=1.0):
        return torch.tanh(self.up(x)) * scale


class Looping(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.blocks, self.step = nn.ModuleList(Scaled() for _ in range(4)), step

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = self.step(x, i, block)
        return x.square().mean()


@pytest.mark.parametrize("make", ["stack", "pipeline", "pipeline_model"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_does_more_than_call_its_blocks_is_an_error(name, make):
    """Without a mesh it runs as Python runs it."""
    torch.manual_seed(0)
    model, mesh, x = Looping(LOOPS[name]), gspmd.Mesh(stage=2), torch.randn(8, 4)
    expected = model(x)
    if make == "stack":
        model.blocks = gspmd.stack(model.blocks)
    elif make == "pipeline":
        model.blocks = gspmd.pipeline(model.blocks, mesh, microbatches=4)
    else:
        options = {"microbatches": 4, "schedule": "1f1b"}
        model = gspmd.pipeline_model(model, "blocks", mesh, **options)
    torch.testing.assert_close(model(x), expected)
    with pytest.raises(gspmd.ShardingError, match="in a loop over blocks that run|on values"):
        gspmd.plan(model, x, mesh=mesh, grad=True)


@pytest.mark.parametrize("make", ["stack", "pipeline"])
def test_a_loop_may_checkpoint_its_blocks_and_read_shapes(make):
    def step(x, i, block):
        assert x.shape[-1] == 4 and x.dtype == torch.double and x.dim() == 2 and len(x) == 8
        return checkpoint(block, x, use_reentrant=False)

    torch.manual_seed(0)
    model, mesh = Looping(step).double(), gspmd.Mesh(stage=2)
    x = torch.randn(8, 4, dtype=torch.double)
    loss = model(x)
    loss.backward()
    expected = torch.stack([block.up.weight.grad for block in model.blocks])
    options = {} if make == "stack" else {"mesh": mesh, "microbatches": 4}
    model.blocks = getattr(gspmd, make)(model.blocks, **options)
    found, gradients = gspmd.plan(model, x, mesh=mesh, grad=True).simulate(x)
    torch.testing.assert_close(found, loss.detach())
    torch.testing.assert_close(gradients["blocks.block.up.weight"], expected)


class Numbered(Scaled):
    """Like a transformers layer: a number that its cache reads, and one that its loop reads."""

    def __init__(self, number):
        super().__init__()
        self.number, self.kind = number, "even" if number % 2 == 0 else "odd"

    def forward(self, x, cache=None):
        if cache is not None:
            cache.append(self.number)
        return torch.tanh(self.up(x))


def made(make, model, mesh):
    if make == "pipeline_model":
        options = {"microbatches": 4, "schedule": "1f1b"}
        return gspmd.pipeline_model(model, "blocks", mesh, **options)
    options = {} if make == "stack" else {"mesh": mesh, "microbatches": 4}
    model.blocks = getattr(gspmd, make)(model.blocks, **options)
    return model


@pytest.mark.parametrize("make", ["stack", "pipeline", "pipeline_model"])
def test_numbers_of_blocks_may_differ_where_no_program_reads_them(make):
    kinds, cache, keeps = [], [], [False]

    def step(x, i, block):
        kinds.append(block.kind)
        return block(x, cache if keeps[0] else None)

    torch.manual_seed(0)
    model, mesh = Looping(step).double(), gspmd.Mesh(stage=2)
    model.blocks = nn.ModuleList(Numbered(i) for i in range(4)).double()
    x = torch.randn(8, 4, dtype=torch.double)
    expected = model(x)
    expected.backward()
    gradient = torch.stack([block.up.weight.grad for block in model.blocks])
    model = copy.deepcopy(made(make, model, mesh))
    kinds.clear()
    found, gradients = gspmd.plan(model, x, mesh=mesh, grad=True).simulate(x)
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(gradients["blocks.block.up.weight"], gradient)
    assert kinds[:4] == ["even", "odd", "even", "odd"] and "even" not in repr(model)
    keeps[0] = True
    with pytest.raises(gspmd.ShardingError, match="read number, which differs: 0, 1, 2, 3"):
        gspmd.plan(model, x, mesh=mesh, grad=True)
    cache.clear()
    model(x)  # each block in turn has its own number
    assert cache == [0, 1, 2, 3]
    model.blocks.block.number = 7
    gspmd.plan(model, x, mesh=mesh, grad=True)
    assert model.blocks.block.number == 7


class Shaped(Scaled):
    """A layer with what other people's layers have of their own."""

    def __init__(self, number, kind):
        super().__init__()
        self.path = nn.Dropout(0.5) if kind == "module" and number else nn.Identity()
        if kind == "buffer" and number:
            self.register_buffer("mask", torch.ones(4))
        if kind == "missing" and not number:
            self.first = True
        self.shift = (0, number) if kind == "tuple" else (0, 0)
        self.act = torch.tanh if kind == "function" and number else torch.sigmoid

    def forward(self, x):
        x = x.roll(self.shift[1], 0) * (2 if hasattr(self, "first") else 1)
        return self.path(self.act(self.up(x)))


@pytest.mark.parametrize(
    "kind, words",
    [
        ("module", r"blocks 0 and 1 of a stack differ: \['path'\]"),
        ("buffer", r"blocks 0 and 1 of a stack differ: \['mask'\]"),
        ("tuple", r"read shift, which differs: \(0, 0\), \(0, 1\)"),
        ("function", "read act, which differs"),
        ("missing", "read first, which differs: True, none"),
    ],
)
def test_blocks_that_compute_otherwise_are_an_error(kind, words):
    """All blocks would run the first one's program."""
    blocks, x = [Shaped(number, kind) for number in range(2)], torch.ones(4, 4)
    expected = blocks[1].eval()(blocks[0].eval()(x))
    with pytest.raises(gspmd.ShardingError, match=words):
        model = gspmd.stack(blocks).eval()
        torch.testing.assert_close(model(x), expected)  # one by one each has its own
        gspmd.plan(model, x, mesh=gspmd.Mesh(stage=2))


def test_dropout_rates_that_differ_are_an_error():
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.Dropout(p)) for p in (0.1, 0.2)]
    with pytest.raises(gspmd.ShardingError, match="of a stack read 1.p, which differs: 0.1, 0.2"):
        gspmd.plan(gspmd.stack(blocks), torch.ones(4, 2), mesh=gspmd.Mesh(stage=2))


@pytest.mark.parametrize("make", ["stack", "pipeline", "pipeline_model"])
def test_a_block_that_returns_another_dtype_is_an_error(make):
    """Under autocast a product returns bfloat16 for float32."""
    model, mesh, x = Looping(lambda x, i, block: block(x)), gspmd.Mesh(stage=2), torch.ones(8, 4)
    model.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    if make == "pipeline_model":
        options = {"microbatches": 4, "schedule": "1f1b"}
        model = gspmd.pipeline_model(model, "blocks", mesh, **options)
    else:
        options = {} if make == "stack" else {"mesh": mesh, "microbatches": 4}
        model.blocks = getattr(gspmd, make)(model.blocks, **options)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(gspmd.ShardingError, match="takes float32.* and returns bfloat16"):
            gspmd.plan(model, x, mesh=mesh, grad=True)
