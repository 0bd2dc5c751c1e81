"""param_dtype and reduce_dtype in plans: casts before gathers, sums in the dtype asked for."""

import copy

import expecttest
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, rand
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Mesh

BF16, F32 = torch.bfloat16, torch.float32


class Block(nn.Module):
    """A tied word table, a norm, biases."""

    def __init__(self, hidden=12):
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)

    def forward(self, tokens):  # [b, s]
        x = self.words(tokens)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x @ self.words.weight.T  # [b, s, v]


def tokens():
    return torch.randint(10, (8, 3), generator=torch.Generator().manual_seed(0))


def block(mesh=None, layout="", hidden=12):
    torch.manual_seed(0)
    model = Block(hidden)
    if layout == "fsdp":
        for parameter in model.parameters():
            gspmd.mark_sharding(parameter, mesh, ("data", *(None,) * (parameter.dim() - 1)))
    if layout in ("tp", "2d"):
        rows = "data" if layout == "2d" else "_"
        gspmd.annotate(
            model,
            mesh,
            {
                "up.weight": f"model {rows}",
                "up.bias": "model",
                "down.weight": f"{rows} model",
                "words.weight": f"model {rows}",
            },
        )
    return model


def planned(mesh, layout, model=None, **options):
    specs = "data _" if "data" in mesh.names else "_ _"
    return gspmd.plan(
        model or block(mesh, layout), tokens(), mesh=mesh, in_specs=specs, grad=True, **options
    )


def gradient_sums(plan):
    """The dtypes in which gradients of parameters are summed over devices."""
    stack, dtypes = list(plan.sharded.output_node().args[0][1:]), []
    while stack:
        value = stack.pop()
        if "step" in value.meta and value.args[0].meta["spec"].pending:
            dtypes.append(value.meta["val"].dtype)
        if "step" in value.meta or ("rule" in value.meta and not value.meta["rule"].reduce):
            stack += [v for v in value.all_input_nodes if v.meta.get("backward")]
    return dtypes


def gathered(plan):
    return {c.dtype for c in plan.collectives if c.kind == "all_gather"}


MESHES = [
    (Mesh(data=4), "dp"),
    (Mesh(data=4), "fsdp"),
    (Mesh(data=3), "fsdp"),
    (Mesh(data=2, model=2), "tp"),
    (Mesh(data=2, model=2), "2d"),
]


class TestText(expecttest.TestCase):
    def test_fsdp(self):
        mesh = Mesh(data=2)
        model = nn.Linear(4, 6, bias=False)
        gspmd.mark_sharding(model.weight, mesh, "data _")
        plan = gspmd.plan(
            model,
            rand(8, 4),
            mesh=mesh,
            in_specs="data _",
            out_specs="data _",
            grad=True,
            param_dtype=BF16,
            reduce_dtype=F32,
        )
        self.assertExpectedInline(
            plan.text(full=True),
            """\
mesh data=2
  %weight      : f32[6@data, 4]     = input
  %input_1     : f32[8@data, 4]     = input
  %tangent_0   : bf16[8@data, 6]    = input
  %_to_copy    : bf16[6@data, 4]    = _to_copy(%weight, dtype=bf16)
  %_to_copy_1  : bf16[8@data, 4]    = _to_copy(%input_1, dtype=bf16)
  %_to_copy_g  : bf16[6, 4]         = all_gather(%_to_copy, 0, data)
  %einsum      : bf16[8@data, 6]    = einsum(cb,ab->ca, %_to_copy_1, %_to_copy_g)
  %einsum_1    : f32[6, 4] sum@data = einsum(ca,cb->ab, %tangent_0, %_to_copy_1) in bf16
  %einsum_1_rs : f32[6@data, 4]     = reduce_scatter(%einsum_1, sum, 0, data)
  return %einsum, %einsum_1_rs

all_gather     over data            1 x, 24 B sent by a device
reduce_scatter over data            1 x, 48 B sent by a device
sent by a device in all: 72 B
memory of a device: parameters 48 B, inputs 112 B, peak 352 B""",
        )
        self.assertEqual(
            [(c.kind, c.dtype, c.payload_bytes) for c in plan.collectives],
            [("all_gather", "bf16", 48), ("reduce_scatter", "f32", 96)],
        )

    def test_narrow_dtype_of_a_float32_model(self):
        model = nn.Linear(4, 6, bias=False)
        plan = gspmd.plan(
            model,
            rand(8, 4),
            mesh=Mesh(data=2),
            in_specs="data _",
            out_specs="data _",
            grad=True,
            reduce_dtype=BF16,
        )
        self.assertExpectedInline(
            plan.text(full=True),
            """\
mesh data=2
  %weight     : f32[6, 4]           = input
  %input_1    : f32[8@data, 4]      = input
  %tangent_0  : f32[8@data, 6]      = input
  %einsum     : f32[8@data, 6]      = einsum(cb,ab->ca, %input_1, %weight)
  %einsum_1   : bf16[6, 4] sum@data = einsum(ca,cb->ab, %tangent_0, %input_1) in f32
  %einsum_1_r : bf16[6, 4]          = all_reduce(%einsum_1, sum, data)
  %to_dtype   : f32[6, 4]           = to(%einsum_1_r, f32)
  return %einsum, %to_dtype

all_reduce     over data            1 x, 48 B sent by a device
sent by a device in all: 48 B
memory of a device: parameters 96 B, inputs 160 B, peak 496 B""",
        )


@pytest.mark.parametrize("mesh, layout", MESHES, ids=str)
def test_dtypes_of_collectives(mesh, layout):
    """Weights are gathered in bf16, gradients summed in f32, whatever costs less."""
    plan = planned(mesh, layout, param_dtype=BF16, reduce_dtype=F32)
    assert {c.dtype for c in plan.collectives if c.kind == "all_gather"} <= {"bf16"}
    sums = gradient_sums(plan)
    assert len(sums) >= 6 and {*sums} == {F32}
    assert all(v.meta["val"].dtype == F32 for v in plan.sharded.output_node().args[0][1:])
    narrow = planned(mesh, layout, param_dtype=BF16)
    assert BF16 in gradient_sums(narrow) and narrow.sent_bytes < plan.sent_bytes


@pytest.mark.parametrize("mesh, layout", MESHES, ids=str)
def test_numbers(mesh, layout):
    """As the model with bf16 weights on one device."""
    single = block().to(BF16)
    want = single(tokens())
    want.sum().backward()
    plan = planned(mesh, layout, param_dtype=BF16, reduce_dtype=F32)
    got, gradients = plan.simulate(tokens())
    assert got.dtype == BF16
    assert_same(got, want.detach(), terms=4)
    for name, parameter in single.named_parameters():
        assert gradients[name].dtype == F32
        assert_same(gradients[name].to(BF16), parameter.grad, name, terms=8)


@pytest.mark.parametrize("how", ["param_dtype", "autocast", "bfloat16 model"])
def test_gradients_are_float32_sums_of_bf16_terms(how):
    """Each device computes its term in bf16; the terms are added up in float32."""
    torch.manual_seed(0)
    # Without biases: on one device they are added before a product is rounded.
    model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.ReLU(), nn.Linear(12, 4, bias=False))
    if how == "bfloat16 model":
        model = model.to(BF16)
    x = rand(64, 8).to(BF16 if how == "bfloat16 model" else F32)
    options = {"param_dtype": BF16} if how == "param_dtype" else {}
    with torch.autocast("cpu", BF16, enabled=how == "autocast"):
        plan = gspmd.plan(
            model,
            x,
            mesh=Mesh(data=4),
            in_specs="data _",
            out_specs="data _",
            grad=True,
            reduce_dtype=F32,
            **options,
        )
    sums = {}
    for rows in x.to(BF16).chunk(4):
        term = copy.deepcopy(model).to(BF16)
        term(rows).sum().backward()
        for name, parameter in term.named_parameters():
            sums[name] = sums.get(name, 0) + parameter.grad.to(F32)
    assert gradient_sums(plan) == [F32] * 2
    _, gradients = plan.simulate(x)
    for name, parameter in model.named_parameters():
        assert gradients[name].dtype == parameter.dtype
        assert_same(gradients[name], sums[name].to(parameter.dtype), name, terms=4)


def test_few_bytes_for_a_float32_model():
    mesh = Mesh(data=4)
    plan, exact = (planned(mesh, "fsdp", reduce_dtype=dtype) for dtype in (BF16, None))
    assert {*gradient_sums(plan)} == {BF16}
    sent = [
        sum(c.sent_bytes for c in p.collectives if c.kind == "reduce_scatter")
        for p in (plan, exact)
    ]
    assert 2 * sent[0] == sent[1]
    for got, want in zip(plan.simulate(tokens())[1].values(), exact.simulate(tokens())[1].values()):
        assert got.dtype == F32
        assert_same(got.to(BF16), want.to(BF16), terms=4)


class Marked(nn.Module):
    """A weight that is the product of two parameters, with a mark inside of forward."""

    def __init__(self, mesh):
        super().__init__()
        self.weight, self.scale = nn.Parameter(rand(6, 4)), nn.Parameter(rand(6, 1, seed=1))
        self.mesh = mesh

    def forward(self, x):  # [b, i]
        weight = gspmd.mark_sharding(self.weight * self.scale, self.mesh, "_ _")
        return x @ weight.T + x[:, :1] * torch.cat([self.weight[:3], self.weight[3:]]).sum(1)


def test_what_lies_between_a_sum_and_its_parameter():
    """Products, marks, slices and additions of gradients compute in float32 too."""
    mesh = Mesh(data=2)
    plan = gspmd.plan(
        Marked(mesh),
        rand(8, 4),
        mesh=mesh,
        in_specs="data _",
        out_specs="same",
        grad=True,
        param_dtype=BF16,
        reduce_dtype=F32,
    )
    assert {*gradient_sums(plan)} == {F32}
    single = Marked(mesh).to(BF16)
    single(rand(8, 4).to(BF16)).sum().backward()
    for name, got in plan.simulate(rand(8, 4))[1].items():
        assert_same(got.to(BF16), single.get_parameter(name).grad, name, terms=8)
