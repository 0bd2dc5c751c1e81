"""A call leaves arguments, parameters, buffers and attributes as they were, to the last bit."""

import math

import torch
from callers_tensors import DTYPES, bits, drawn, tensors, unchanged, values
from ranks import distributed
from torch import nn

import torchgspmd as gspmd
from torchgspmd.comm.value_check import FLOATS, TURN


class Copies(nn.Module):
    """All values travel: the arguments are sharded and the results are not."""

    def forward(self, xs):
        return [x.clone() for x in xs]


@distributed("data=2")
def test_arguments_of_all_dtypes_and_layouts(mesh):
    """Each is read at its turn; the results have the same bits too."""
    exact = torch.bfloat16, torch.float64, torch.complex128, torch.int64
    for check, dtypes in (("always", DTYPES), ("first", exact), ("never", exact)):
        named = tensors(*dtypes)
        xs, axis = [*named.values()], mesh.names[0]
        specs = ([" ".join([axis, *"_" * (x.dim() - 1)]) if x.dim() else "" for x in xs],)
        model = gspmd.parallelize(Copies(), mesh, in_specs=specs, check=check)
        for _ in range(1 + -(-sum(x.numel() > FLOATS for x in xs) // TURN)):
            with unchanged(named):
                results = model(xs)
            wrong = [
                name
                for (name, x), y in zip(named.items(), results)
                if (x.shape, x.dtype) != (y.shape, y.dtype) or not torch.equal(values(x), values(y))
            ]
            assert not wrong, wrong


class Affine(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4, dtype=dtype))
        self.bias = nn.Parameter(torch.ones(4, dtype=dtype))
        self.mask = nn.Buffer(torch.tensor([0.0, -math.inf, math.nan, 1.0], dtype=dtype))
        self.scale = drawn(dtype, 4)

    def forward(self, x):
        hidden = (x + self.bias) @ self.weight
        return (hidden + self.bias + self.mask).softmax(-1) * self.scale


@distributed("data=2,model=2")
def test_state_and_gradients(mesh):
    """Forward and backward change nothing but the gradients; x is read by both."""
    for dtype in (torch.float64, torch.complex128):
        layer = Affine(dtype)
        if dtype.is_complex:
            layer.forward = lambda x, layer=layer: (x + layer.bias) @ layer.weight * layer.scale
        gspmd.mark_sharding(layer.weight, mesh, f"_ {mesh.names[-1]}")
        model = gspmd.parallelize(layer, mesh, in_specs=("data _",))
        x = drawn(dtype, 6, 4).requires_grad_()
        state = {"x": x, "scale": layer.scale, **dict(model.state_dict(keep_vars=True))}
        for _ in range(2):
            with unchanged(state):
                y = model(x)
                g = torch.ones_like(y)
                with unchanged({"g": g, "y": y.detach()}):
                    y.backward(g)


class Sum(nn.Module):
    """Gradients that in eager PyTorch would be those of the result, or of each other."""

    FORMS = {
        "sum": lambda a, b: a + b,
        "clones": lambda a, b: a.clone() + b.clone(),
        "views": lambda a, b: a.t() + b.t(),
        "joined": lambda a, b: torch.cat([a, b]),
        "scaled": lambda a, b: (a + b) * 2,
        "pads": lambda a, b: (torch.cat([a, b[:1]]) + torch.cat([a[:1], b])) * 2,
        "vectors": lambda a, b: a[0] + b[1],
        "totals": lambda a, b: a.sum() * 2 + b.sum(),
    }

    def __init__(self, form, shape):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(shape)) for _ in range(2))
        self.form = form

    def forward(self):
        return self.FORMS[self.form](self.a, self.b)


@distributed("data=2")
def test_gradients_of_parameters_have_memory_of_their_own(mesh):
    """Clipping scales each once, and not the gradient that the caller passed."""
    for form in Sum.FORMS:
        for shape in ((4, 4), (4,)):
            if shape == (4,) and form == "views":
                continue
            layer = Sum(form, shape)
            reference = Sum(form, shape)
            reference.load_state_dict(layer.state_dict())
            model = gspmd.parallelize(layer, mesh)
            g = torch.full_like(reference(), 3.0)
            expected = torch.autograd.grad(reference(), [*reference.parameters()], g)
            norm = torch.stack([e.norm() for e in expected]).norm()
            model().backward(g)
            assert torch.equal(g, torch.full_like(g, 3.0))
            grads = [p.grad.full_tensor() for p in model.parameters()]
            assert all(map(torch.equal, grads, expected)), form
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert torch.equal(g, torch.full_like(g, 3.0)), form
            for p, e in zip(model.parameters(), expected):
                torch.testing.assert_close(p.grad.full_tensor(), e / norm, rtol=1e-5, atol=1e-6)
            memory = {bits(p.grad).data_ptr() for p in model.parameters()}
            assert len(memory) == 2 and bits(g).data_ptr() not in memory, form
