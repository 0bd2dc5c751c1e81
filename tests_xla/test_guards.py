"""Cases of obscure errors or wrong numbers in torch_xla: a clear error here, or repaired."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from environment import ENVIRONMENT, ROOT
from expecttest import assert_expected_inline
from helpers import message
from programs import MESH
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardSpec
from torchgspmd.xla_backend.lower import lower
from torchgspmd.xla_backend.runtime import pin, place_tensor, start, sync
from torchgspmd.xla_backend.sharding import check, layout_text, text_of


def on_xla(module: nn.Module, **options) -> nn.Module:
    return gspmd.parallelize(module, MESH, backend="xla", **options)


class Marked(nn.Module):
    def __init__(self, spec: str, shape: tuple[int, ...]):
        super().__init__()
        self.spec, self.shape = spec, shape

    def forward(self, x):
        return gspmd.mark_sharding(x.reshape(self.shape), MESH, self.spec) * 2


def test_part_of_the_devices_is_no_mesh():
    assert_expected_inline(
        message(lambda: gspmd.parallelize(nn.Linear(2, 2), Mesh(data=4), backend="xla")),
        """\
mesh data=4 has 4 devices, XLA has 8
  where test_guards.py:N
  why   torch_xla partitions for all devices at once; a part of them cannot be a mesh
  fix   add an axis, or set CPU_NUM_DEVICES for virtual devices on the CPU""",
    )


def test_an_unknown_pin():
    assert_expected_inline(
        message(lambda: on_xla(nn.Linear(2, 2), advanced={"pin": "some"})),
        """\
there is no pin 'some'; there are 'user', 'all', 'none'
  where test_guards.py:N""",
    )


def test_a_parameter_of_six_dimensions():
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(8, 1, 1, 1, 1, 2))
    gspmd.mark_sharding(module.weight, MESH, "data _ _ _ _ _")
    assert_expected_inline(
        message(lambda: on_xla(module)),
        """\
'weight': torch_xla shards tensors of at most 5 dimensions, not 'data _ _ _ _ _'
  fix   merge dimensions that are not sharded, or mark it before they are split""",
    )


def test_a_value_of_six_dimensions():
    model = on_xla(Marked("data _ _ _ _ _", (8, 1, 1, 1, 1, 2)))
    assert_expected_inline(
        message(lambda: model(torch.zeros(8, 2))),
        """\
a mark: torch_xla shards tensors of at most 5 dimensions, not 'data _ _ _ _ _'
  where test_guards.py:N
  fix   merge dimensions that are not sharded, or mark it before they are split""",
    )


@pytest.mark.parametrize("pin", ["user", "all"])
def test_values_of_six_dimensions_without_a_mark(pin):
    class Deep(nn.Module):
        def forward(self, x):
            return (x.reshape(8, 1, 1, 2, 2, 2) * 2).sum((1, 2)).flatten(1)

    x = torch.randn(8, 8)
    model = gspmd.parallelize(Deep(), MESH, backend="xla", in_specs="data _", advanced={"pin": pin})
    torch.testing.assert_close(model(x).cpu(), x * 2)


def test_open_dimensions_are_decided_by_our_propagation():
    x = torch.randn(8, 16)
    model = gspmd.parallelize(Marked("? model", (8, 16)), MESH, backend="xla", in_specs="data _")
    y = model(x)
    sync()
    assert layout_text(y) == text_of(ShardSpec.parse("data model"), MESH, tuple(range(8)))
    torch.testing.assert_close(y.cpu(), x * 2)


def test_a_pending_reduction():
    assert_expected_inline(
        message(lambda: check(ShardSpec.parse("_ sum@data"), MESH, "the value")),
        """\
the value: XLA has no layout '_ sum@data' with a pending reduction""",
    )


def test_axes_of_size_one_shard_nothing():
    assert check(ShardSpec.parse("one+data _"), Mesh(one=1, data=8), "x") == ShardSpec.parse(
        "data _"
    )


def test_data_are_laid_out_anew():
    x = torch.randn(13, 8)
    tensor = place_tensor(x, ShardSpec.parse("data model"), MESH, start(MESH))
    pin(tensor, MESH, ShardSpec.parse("_ data"))
    sync()
    assert layout_text(tensor) == text_of(ShardSpec.parse("_ data"), MESH, tuple(range(8)))
    assert torch.equal(tensor.cpu(), x)


def traced(op, *args) -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    node = graph.call_function(op, (x, *args))
    node.meta |= {"val": torch.empty(4), "source": "model.py:7"}
    graph.output((node,))
    return graph


def test_collectives_in_the_program():
    graph = traced(torch.ops._c10d_functional.all_reduce.default, "sum", "0")
    assert_expected_inline(
        message(lambda: lower(graph, MESH, start(MESH), "user", {})),
        """\
the program calls the collective _c10d_functional::all_reduce
  where model.py:7
  why   XLA sees one process, in which it does nothing; the program is partitioned by XLA itself
  fix   leave it out: marks say how tensors are laid out, and XLA communicates""",
    )


def test_an_annotation_that_loses_gradients():
    graph = traced(torch.ops.xla.dynamo_mark_sharding.default, [], [], [], [], 0)
    assert_expected_inline(
        message(lambda: lower(graph, MESH, start(MESH), "user", {})),
        """\
xla::dynamo_mark_sharding loses the gradient
  where model.py:7
  fix   use torchgspmd.mark_sharding""",
    )


class Uses(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(gspmd.mark_sharding(x, MESH, "data _"))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.nn.functional.group_norm(x[..., None], 2).squeeze(-1),
        lambda x: torch.roll(x, (3, -1), (0, 1)),
        torch.logcumsumexp,
        lambda x: torch.bucketize(x, torch.linspace(-1, 1, 5)),
        lambda x: x.renorm(2, 0, 1.0),
        lambda x: torch.histc(x, 5, -1, 1),
        lambda x: torch.linalg.vector_norm(x, dim=1),
        lambda x: x @ x.T,
        lambda x: x + torch.arange(8.0),
        lambda x: x * torch.tensor(3.0),
    ],
    ids=[
        "group_norm",
        "roll",
        "logcumsumexp",
        "bucketize",
        "renorm",
        "histc",
        "vector_norm",
        "matmul",
        "arange",
        "constant",
    ],
)
def test_operations_have_the_numbers_of_one_device(function, recwarn):
    if function is torch.logcumsumexp:
        function = lambda x: torch.logcumsumexp(x, 1)  # noqa: E731
    x = torch.randn(10, 8)
    model = on_xla(Uses(function))
    torch.testing.assert_close(model(x).cpu(), function(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "function, name",
    [
        (lambda x: x[x > 0].sort().values.sum(), "aten::nonzero"),
        (lambda x: torch.fft.fft(x).real, "aten::_fft_r2c"),
        (lambda x: x.median(1).values, "aten::median"),
    ],
    ids=["mask", "fft", "median"],
)
def test_an_operation_for_the_host_is_reported(function, name):
    x = torch.randn(9, 8)
    model = on_xla(Uses(function))
    with pytest.warns(UserWarning, match=rf"{name}.* has no kernel on XLA: the host computes it"):
        y = model(x)
    torch.testing.assert_close(y.cpu(), function(x), rtol=1e-4, atol=1e-4)


def test_parameters_elsewhere():
    model = on_xla(nn.Linear(4, 4))
    model.weight = nn.Parameter(torch.zeros(4, 4))
    assert_expected_inline(
        message(lambda: model(torch.zeros(8, 4))),
        """\
'weight' is on cpu, not on xla:0
  where test_guards.py:N
  fix   call model.to_empty(device='xla') for a model on meta, then initialize it; \
make other changes before it is wrapped""",
    )


def test_a_dtensor(tmp_path):
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        batch = distribute_tensor(torch.zeros(8, 4), init_device_mesh("cpu", (1,)))
        assert_expected_inline(
            message(lambda: on_xla(nn.Linear(4, 4))(batch)),
            """\
a DTensor is given to a program on XLA
  where test_guards.py:N
  fix   pass the global batch as a plain tensor, or call shard_batch""",
        )
    finally:
        dist.destroy_process_group()


def test_starting_twice_is_once():
    assert start(MESH) == start(Mesh(data=2, model=2, pipe=2))


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env={
            **os.environ,
            **ENVIRONMENT,
            "PYTHONPATH": str(Path(gspmd.__file__).parent.parent),
            "XLA_USE_SPMD": "0",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_backward_before_xla_is_started():
    printed = run("""
import torch, torchgspmd as gspmd
torch.ones(2, requires_grad=True).sum().backward()
try:
    gspmd.parallelize(torch.nn.Linear(2, 2), gspmd.Mesh(data=8), backend="xla")
except gspmd.ShardingError as error:
    print(error)
""")
    assert [line for line in printed.splitlines() if not line.startswith("  where")] == [
        "backwards on XLA cannot run in this process any more",
        "  why   a backward ran on another device before XLA was started",
        "  fix   call parallelize(..., backend='xla') before the first backward",
    ]


def test_xla_without_spmd_is_in_use():
    printed = run("""
import torch, torch_xla, torchgspmd as gspmd
x = torch.ones(2).to("xla")
try:
    gspmd.parallelize(torch.nn.Linear(2, 2), gspmd.Mesh(data=8), backend="xla")
except gspmd.ShardingError as error:
    print(str(error).splitlines()[0])
""")
    assert printed == "this process uses XLA already, without SPMD\n"
