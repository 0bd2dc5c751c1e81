"""Windows over sharded dimensions: numbers forward and backward, what is sent, the printed graph."""

import random

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers import assert_same

import torchgspmd as gspmd
from torchgspmd import Mesh

MESHES = (Mesh(s=2), Mesh(s=3), Mesh(s=4), Mesh(s=8), Mesh(s=2, t=2), Mesh(s=3, t=2))


def with_gradients(function, count: int):
    """Return a function's result and, for a cotangent, gradients by the first `count` arguments."""

    def both(*args):
        *inputs, dy = [a.detach().requires_grad_(i < count) for i, a in enumerate(args)]
        y = function(*inputs)
        return y, *torch.autograd.grad(y, inputs[:count], dy)

    return both


def check(function, args, specs, mesh, out_specs=None) -> gspmd.Plan:
    plan = gspmd.plan(function, *args, mesh=mesh, in_specs=tuple(specs), out_specs=out_specs)
    assert_same(plan.simulate(*args, _poison=True), function(*args), f"{specs} on {mesh!r}\n{plan}")
    return plan


def sent(plan: gspmd.Plan, kind: str = "permute") -> float:
    return sum(c.sent_bytes for c in plan.collectives if c.kind == kind)


def random_convolution(draw: random.Random):
    """(function, x, w) of any number of dimensions, strides, dilations, paddings and groups,
    transposed or not; or None.
    """
    n, transposed, groups = (
        draw.choice([1, 1, 2, 2, 3]),
        draw.random() < 0.4,
        draw.choice([1, 1, 2]),
    )
    kernel, stride, dilation, padding = (
        [draw.randint(low, high) for _ in range(n)]
        for low, high in ((1, 4), (1, 3), (1, 3), (0, 3))
    )
    options = dict(stride=stride, padding=padding, dilation=dilation, groups=groups)
    if transposed:
        options["output_padding"] = [
            draw.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation)
        ]
    c, k = 2 * draw.randint(1, 2), 2 * draw.randint(1, 2)
    x = torch.randn(
        2, c, *(draw.randint(3, 9 if n == 3 else 20) for _ in range(n)), dtype=torch.float64
    )
    w = torch.randn(
        *((c, k // groups) if transposed else (k, c // groups)), *kernel, dtype=torch.float64
    )
    operation = getattr(F, f"conv{'_transpose' * transposed}{n}d")
    try:
        fits = operation(x, w, **options).numel() > 0
    except RuntimeError:  # kernel larger than what there is
        fits = False
    return (lambda x, w: operation(x, w, **options), x, w) if fits else None


def random_spec(draw: random.Random, rank: int, mesh: Mesh) -> str:
    dims = [""] * rank
    for axis in draw.sample(mesh.names, len(mesh.names)):
        dim = draw.randrange(2, rank) if draw.random() < 0.8 else draw.randrange(2)
        dims[dim] += "+" * bool(dims[dim]) + axis
    return " ".join(d or "_" for d in dims)


@pytest.mark.parametrize("seeds", [range(i, i + 20) for i in range(0, 100, 20)], ids=str)
def test_random_convolutions(seeds):
    exchanged = 0
    for seed in seeds:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        made = random_convolution(draw)
        if made is None:
            continue
        function, x, w = made
        mesh, dy = draw.choice(MESHES), torch.randn_like(function(x, w))
        spec = random_spec(draw, x.dim(), mesh)
        plan = check(with_gradients(function, 2), (x, w, dy), (spec, None, spec), mesh)
        exchanged += any(
            n.meta["step"].kind == "halo" for n in plan.sharded.nodes if "step" in n.meta
        )
    assert exchanged > 5


def image(channels: int = 3, rows: int = 16, columns: int = 8) -> torch.Tensor:
    return torch.randn(2, channels, rows, columns, generator=torch.Generator().manual_seed(rows))


def test_the_graph_of_a_convolution():
    """The rows that the forward received serve the weight's gradient as well."""
    both = with_gradients(lambda x, w: F.conv2d(x, w, padding=1), 2)
    args = image(), torch.randn(4, 3, 3, 3), image(4)
    plan = check(
        lambda x, w, dy: both(x, w, dy), args, ("_ _ s _", "_ _ _ _", "_ _ s _"), Mesh(s=4)
    )
    text = plan.text(full=True)
    assert_expected_inline(
        text[: text.index("\n\n")],
        """\
mesh s=4
  %x                    : f32[2, 3, 16@s, 8]          = input
  %w                    : f32[4, 3, 3, 3]             = input
  %dy                   : f32[2, 4, 16@s, 8]          = input
  %x_h                  : f32[2, 3, 16@s[4i-1:+6], 8] = halo(%x, 2, s, 4i-1:+6 in 0:16 else 0, 16)
  %convolution          : f32[2, 4, 16@s, 8]          = convolution(%x_h, %w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
  %dy_h                 : f32[2, 4, 16@s[4i-1:+6], 8] = halo(%dy, 2, s, 4i-1:+6 in 0:16 else 0, 16)
  %convolution_1        : f32[2, 3, 16@s, 8]          = convolution(%dy_h, %w, None, [1, 1], [1, 1], [1, 1], True, [0, 0], 1)
  %full                 : f32[]                       = full([], 0, dtype=f32)
  %expand               : f32[4, 3, 3, 3]             = expand(%full, [4, 3, 3, 3])
  %convolution_backward : (f32[4, 3, 3, 3] sum@s)     = convolution_backward(%dy, %x_h, %expand, None, [1, 1], [1, 1], [1, 1], \
False, [0, 0], 1, [False, True, False])
  %getitem_1            : f32[4, 3, 3, 3] sum@s       = %convolution_backward[1]
  %getitem_1_r          : f32[4, 3, 3, 3]             = all_reduce(%getitem_1, sum, s)
  return %convolution, %convolution_1, %getitem_1_r""",
    )
    assert sent(plan) == 2 * (3 + 4) * 2 * 8 * 4  # one row each way of x and of dy


def test_the_text_does_not_grow_with_the_mesh():
    def program(count: int) -> list[str]:
        x = torch.empty(2, 3, 4 * count, 8, device="meta")
        plan = gspmd.plan(
            lambda x, w: F.conv2d(x, w, padding=1),
            x,
            torch.empty(4, 3, 3, 3, device="meta"),
            mesh=Mesh(s=count),
            in_specs=("_ _ s _", "_ _ _ _"),
        )
        return plan.program.code.replace(str(4 * count), "ROWS").splitlines()

    assert program(8) == program(512)


def test_a_halo_wider_than_a_shard_comes_over_several_hops():
    plan = check(
        lambda x, w: F.conv1d(x, w, padding=8),
        (torch.randn(1, 2, 16), torch.randn(3, 2, 17)),
        ("_ _ s", "_ _ _"),
        Mesh(s=8),
    )
    assert [c.kind for c in plan.collectives] == ["permute"]
    assert sent(plan) == 7 * 2 * 2 * 4  # its two rows of two channels to all of the others


# ----------------------------------------------------------------------------- pooling, moving rows


def random_pool(draw: random.Random):
    """(function, x) of max or average pooling with any options; the function returns a tuple. None
    if nothing is left.
    """
    n, largest = draw.choice([1, 2, 2, 3]), draw.random() < 0.5
    kernel, stride = [draw.randint(1, 4) for _ in range(n)], [draw.randint(1, 4) for _ in range(n)]
    options = dict(
        stride=stride,
        padding=[draw.randint(0, k // 2) for k in kernel],
        ceil_mode=draw.random() < 0.5,
    )
    if largest:
        options |= dict(
            dilation=[draw.randint(1, 2) for _ in range(n)], return_indices=draw.random() < 0.3
        )
    else:
        options |= dict(count_include_pad=draw.random() < 0.5) | (
            dict(divisor_override=draw.choice([None, 3])) if n > 1 else {}
        )
    operation = getattr(F, f"{'max' if largest else 'avg'}_pool{n}d")
    x = torch.randn(
        2, 3, *(draw.randint(3, 9 if n == 3 else 20) for _ in range(n)), dtype=torch.float64
    )
    x = x.relu() if draw.random() < 0.5 else x  # many equal maxima

    def function(x):
        y = operation(x, kernel, **options)
        return y if isinstance(y, tuple) else (y,)

    try:
        fits = function(x)[0].numel() > 0
    except RuntimeError:
        fits = False
    return (function, x) if fits else None


@pytest.mark.parametrize("seeds", [range(i, i + 25) for i in range(0, 75, 25)], ids=str)
def test_random_pools(seeds):
    exchanged = 0
    for seed in seeds:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        made = random_pool(draw)
        if made is None:
            continue
        pool, x = made

        def both(x, dy, pool=pool):
            x = x.detach().requires_grad_()
            out = pool(x)
            return out, torch.autograd.grad(out[0], x, dy)

        mesh = draw.choice(MESHES)
        spec = random_spec(draw, x.dim(), mesh)
        plan = check(both, (x, torch.randn_like(pool(x)[0])), (spec, spec), mesh)
        exchanged += any(
            n.meta["step"].kind == "halo" for n in plan.sharded.nodes if "step" in n.meta
        )
    assert exchanged > 5


@pytest.mark.parametrize(
    "kernel, stride, padding, rows_sent",
    [(2, 2, 0, 0), (3, 2, 1, 1 + 1), (3, 1, 1, 2 + 2), ((5, 3), 2, (2, 1), 3 + 3)],
    ids=str,
)
def test_max_pools_send_short_rows_and_no_indices(kernel, stride, padding, rows_sent):
    """Rows as wide as the result's: half as wide with stride 2. Forward those of x, backward those
    of its gradient.
    """

    def both(x, dy):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(F.max_pool2d(x, kernel, stride, padding), x, dy)

    x = torch.randn(2, 3, 32, 8).relu()
    dy = torch.randn_like(F.max_pool2d(x, kernel, stride, padding))
    plan = check(both, (x, dy), ("_ _ s _", "_ _ s _"), Mesh(s=4), "_ _ s _")
    assert plan.sent_bytes == rows_sent * 2 * 3 * dy.shape[-1] * 4


ROW = 5 * 4  # bytes of one row below


@pytest.mark.parametrize(
    "name, function, rows, bytes_sent",
    [
        ("shifted", lambda x: x[1:61], 64, 2 * ROW),
        ("strided", lambda x: x[1::2], 64, 0),
        ("last", lambda x: x[-3:], 64, None),
        ("padded", lambda x: F.pad(x, (0, 0, 2, 2), value=7.0), 64, 1 * ROW),
        ("cropped", lambda x: F.pad(x, (1, 0, -3, 3)), 64, 3 * ROW),
        ("rolled", lambda x: x.roll(-5, 0), 64, 5 * ROW),
        ("rolled twice", lambda x: x.roll((3, 1), (0, 1)), 64, 3 * ROW),
        ("flipped", lambda x: x.flip(0), 64, 16 * ROW),
        ("uneven roll", lambda x: x.roll(1, 0), 10, 1 * ROW),
        ("uneven flip", lambda x: x.flip(0), 10, 3 * ROW),
        ("own rows", lambda x: torch.cat([x[:2], x[:62]]), 64, None),
        ("twice", lambda x: torch.cat([x, x.sin()]), 10, None),
        ("pair", lambda x: x[1:] - x[:-1], 19, None),
    ],
)
def test_moving_rows(name, function, rows, bytes_sent):
    x = torch.randn(rows, 5)
    for mesh in (Mesh(s=4), Mesh(s=3), Mesh(s=2, t=2)):
        spec = "s t" if "t" in mesh.names else "s _"
        plan = check(function, (x,), (spec,), mesh, spec)
        check(with_gradients(function, 1), (x, torch.randn_like(function(x))), (spec, spec), mesh)
        assert not any(
            c.kind == "all_gather" and c.payload_bytes >= x.numel() * 4 for c in plan.collectives
        ), f"{name}: {plan}"
        assert (
            bytes_sent is None or mesh.shape != (4,) or sent(plan) == plan.sent_bytes == bytes_sent
        ), plan


SHIFTS = {
    "roll": lambda s, x: torch.where((torch.arange(len(s)) == 0)[:, None], x, s.roll(1, 0)),
    "pad": lambda s, x: F.pad(s[:-1], (0, 0, 1, 0)) + F.pad(x[None], (0, 0, 0, len(s) - 1)),
    "cat": lambda s, x: torch.cat([x[None], s[:-1]]),
}


@pytest.mark.parametrize("name", SHIFTS)
@pytest.mark.parametrize("rows", [4, 6, 7])
def test_a_shift_is_one_permute_however_it_is_written(name, rows):
    """Of four rows on as many devices the slice has three: the first device needs none."""
    args, mesh = (torch.randn(rows, 64), torch.randn(64)), Mesh(stage=4)
    plan = check(SHIFTS[name], args, ("stage _", "_"), mesh, "stage _")
    assert [c.kind for c in plan.collectives] == ["permute"], plan
    assert plan.sent_bytes == 64 * 4


@pytest.mark.parametrize("rows", [15, 14, 9])
@pytest.mark.parametrize("pool", [F.avg_pool2d, F.max_pool2d])
def test_a_pool_runs_where_its_windows_are(pool, rows):
    """15 rows are pooled to 7, which are fewer than the devices: the last one has none."""
    x, mesh = torch.randn(1, 16, rows, 112), Mesh(x=8)
    plan = check(lambda x: pool(x, 2), (x,), ("_ _ x _",), mesh, "_ _ _ x")
    assert [c.kind for c in plan.collectives] == ["all_to_all"], plan
    assert plan.sent_bytes == 7 / 8 * 16 * 56 * 4


@pytest.mark.parametrize(
    "name, function, elements",
    [
        ("flip of both", lambda x: x.flip(0, 1), 16),
        ("roll of whole shards", lambda x: x.roll((4, -4), (0, 1)), 16),
        ("roll of some rows", lambda x: x.roll((1, 1), (0, 1)), 7),
        ("roll and flip", lambda x: x.roll(1, 0).flip(1, 0), 16),
    ],
)
@pytest.mark.parametrize("mesh", [Mesh(a=2, b=4), Mesh(b=3, a=2), Mesh(a=2, b=2, c=2)])
def test_rows_of_two_dimensions_move_at_once(name, function, elements, mesh):
    for shape in ((8, 16), (7, 13), (5, 9)):
        x, dy = torch.randn(2, *shape, dtype=torch.float64)
        specs = [("b a",), ("a b",)] if "c" not in mesh.names else [("a c+b",), ("a b+c",)]
        for spec in specs:
            plan = check(function, (x,), spec, mesh, *spec)
            check(with_gradients(function, 1), (x, dy), (*spec, *spec), mesh)
            if (mesh.shape, shape, spec) == ((2, 4), (8, 16), ("a b",)):
                assert plan.sent_bytes <= elements * 8, f"{name}: {plan}"
            if "flip" in name:
                assert len(plan.collectives) == 1, f"{name}: {plan}"


def test_a_part_is_computed_by_the_kernel_of_the_whole():
    """PyTorch convolves one small image by other code than two of them; a ReLU behind it would see
    the difference.
    """
    x, w = torch.randn(2, 4, 32, 16, 16), torch.randn(8, 4, 3, 3, 3)
    plan = gspmd.plan(
        lambda x, w: F.conv3d(x, w, padding=1),
        x,
        w,
        mesh=Mesh(a=2, s=4),
        in_specs=("a _ s _ _", None),
    )
    assert torch.equal(plan.simulate(x, w), F.conv3d(x, w, padding=1))


@pytest.mark.parametrize(
    "name, function, rows",
    [
        ("a pad of one side", lambda x, w: F.conv2d(F.pad(x, (1, 1, 0, 1)), w, stride=2), 1),
        ("a roll", lambda x, w: F.conv2d(x.roll(1, 2), w, padding=1), 2),
        ("a pad cut off", lambda x, w: F.pad(x, (0, 0, 2, 2))[:, :, :16], 2),
        (
            "a pad by reflection",
            lambda x, w: F.conv2d(F.pad(x, (0, 0, 1, 1), mode="reflect"), w),
            2,
        ),
        (
            "a pad by repetition",
            lambda x, w: F.conv2d(F.pad(x, (0, 0, 1, 1), mode="replicate"), w),
            2,
        ),
    ],
)
def test_what_is_moved_before_a_window_is_sent_once(name, function, rows):
    args, mesh = (image(), torch.randn(4, 3, 3, 3)), Mesh(s=4)
    plan = check(function, args, ("_ _ s _", "_ _ _ _"), mesh, "_ _ s _")
    assert [c.kind for c in plan.collectives] == ["permute"], f"{name}: {plan}"
    assert sent(plan) <= rows * 2 * 3 * 8 * 4


def test_moved_rows_in_random_order():
    """Chains of what moves rows, with a convolution or nothing at the end."""
    for seed in range(40):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        steps = [
            draw.choice(["roll", "flip", "pad", "slice", "relu"]) for _ in range(draw.randint(1, 4))
        ]
        shifts = [(draw.randint(-3, 3), draw.randint(0, 3)) for _ in steps]
        ends = draw.random() < 0.6

        def function(x, w, steps=steps, shifts=shifts, ends=ends):
            for step, (a, b) in zip(steps, shifts):
                x = {
                    "roll": lambda x=x, a=a: x.roll(a, 2),
                    "flip": lambda x=x: x.flip(2),
                    "pad": lambda x=x, a=a, b=b: F.pad(x, (b, 1, a, b)),
                    "slice": lambda x=x, b=b: x[:, :, b:],
                    "relu": lambda x=x: x.relu(),
                }[step]()
            return F.conv2d(x, w, padding=1) if ends else x

        x, w, mesh = (
            image(3, draw.randint(14, 20)).double(),
            torch.randn(4, 3, 3, 3, dtype=torch.float64),
            draw.choice(MESHES),
        )
        dy = torch.randn_like(function(x, w))
        spec = random_spec(draw, 4, mesh)
        check(
            with_gradients(function, 2 if ends else 1) if ends else lambda x, w: function(x, w),
            (x, w, dy) if ends else (x, w),
            (spec, None, spec) if ends else (spec, None),
            mesh,
        )


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize(
    "rows, kernel, padding, stride", [(16, 3, 1, 1), (19, 5, 2, 2), (9, 7, 3, 1)]
)
def test_padding_modes(mode, rows, kernel, padding, stride):
    torch.manual_seed(rows)
    conv = torch.nn.Conv2d(3, 4, kernel, stride, padding, padding_mode=mode).double()

    def function(x, w):
        return torch.func.functional_call(conv, {"weight": w}, (x,))

    x = image(3, rows).double()
    dy = torch.randn_like(function(x, conv.weight)).detach()
    for mesh, spec in ((Mesh(s=3), "_ _ s _"), (Mesh(s=2, t=2), "_ _ s t")):
        plan = check(
            with_gradients(function, 2), (x, conv.weight.detach(), dy), (spec, None, spec), mesh
        )
        gathered = [c.payload_bytes for c in plan.collectives if c.kind == "all_gather"]
        assert kernel > 3 or max(gathered, default=0) < x.numel() * 8, (
            plan
        )  # a kernel of many rows wants nearly all


def test_padding_is_no_reason_for_another_layout() -> None:
    """19 rows over two devices are computed as 20. That is less than what it would take to bring
    the batch there and back.
    """
    mesh = gspmd.Mesh(s=2)
    x, w = torch.empty(2, 32, 19, 16, device="meta"), torch.empty(32, 32, 3, 3, device="meta")
    plan = gspmd.plan(
        lambda x, w: F.conv2d(x, w, padding=1),
        x,
        w,
        mesh=mesh,
        in_specs=("_ _ s _", "_ _ _ _"),
        out_specs="_ _ s _",
    )
    assert [c.kind for c in plan.collectives] == ["permute"]
