"""Whatever one asks of a wrapped module, it answers as the model does."""

import copy
import inspect
import warnings

import torch
import torch.distributed as dist
from language_model import close, error_of, whole
from ranks import distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torchgspmd as gspmd

MESH = "data=2"


class Model(nn.Module):
    """A model with all that nn.Module lets a model say of its own state."""

    kind = "small"

    def __init__(self, width: int = 8):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("angles", torch.arange(width).float(), persistent=False)
        self.register_buffer("steps", torch.zeros(2))
        self.plan, self._programs, self.loaded = "of the model", "of the model", None
        self.saved = []
        self.register_state_dict_post_hook(lambda m, state, *_: m.saved.append(len(state)))
        self.register_load_state_dict_pre_hook(_rename)

    def forward(self, x, scale: float = 1.0):
        return self.down(torch.relu(self.up(x * scale))) + self.angles

    def get_extra_state(self):
        return {"version": 7}

    def set_extra_state(self, state):
        self.loaded = state

    def twice(self, x):
        assert self.plan == self._programs == "of the model" and isinstance(self, Model)
        return self(self(x))

    def another(self):
        return type(self)(4)

    def extra_repr(self):
        return "kind=small"

    def __len__(self):
        return 2

    def __getitem__(self, name):
        return getattr(self, name)


def _rename(module, state, prefix, *_):
    """Load what an older version of the model has saved."""
    if prefix + "old.weight" in state:
        state[prefix + "up.weight"] = state.pop(prefix + "old.weight")


def both(mesh):
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    gspmd.annotate(model, mesh, {"up.weight": "data _"})
    return gspmd.parallelize(model, mesh), plain


def same(got, want):
    """Compare results; a module is the one with as many parameters."""
    if isinstance(want, torch.Tensor):
        assert (got.dtype, got.shape, got.requires_grad) == (
            want.dtype,
            want.shape,
            want.requires_grad,
        )
        close(whole(got), want)
    elif isinstance(want, dict):
        assert list(got) == list(want), (list(got), list(want))
        for name in want:
            same(got[name], want[name])
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for g, w in zip(got, want):
            same(g, w)
    elif isinstance(want, nn.Module):
        assert isinstance(got, type(want))
        assert [n for n, _ in got.named_parameters()] == [n for n, _ in want.named_parameters()]
    else:
        assert got == want, (got, want)


def used(module):
    """Return what one sees of a module after a change."""
    return [module.training, module.state_dict(), [p.requires_grad for p in module.parameters()]]


def hooked(register):
    """Return a question: how often a hook that is registered so runs in a call and its backward."""

    def ask(module):
        calls = []
        handle = getattr(module, register)(lambda *_: calls.append(1))
        module(torch.ones(4, 8, requires_grad=True)).sum().backward()
        handle.remove()
        module.zero_grad()
        return len(calls)

    return ask


def load(module):
    state = {name: v for name, v in module.state_dict().items()}
    state["old.weight"] = torch.full((16, 8), 2.0)
    del state["up.weight"]
    keys = module.load_state_dict(state)
    return [list(keys.missing_keys), list(keys.unexpected_keys), module.loaded, used(module)]


QUESTIONS = {
    "add_module": lambda m: [m.add_module("third", nn.LayerNorm(2)), list(m._modules), used(m)],
    "apply": lambda m: [m.apply(lambda k: None) is m, used(m)],
    "bfloat16": lambda m: [m.bfloat16() is m, used(m)],
    "buffers": lambda m: list(m.buffers()),
    "children": lambda m: list(m.children()),
    "cpu": lambda m: [m.cpu() is m, used(m)],
    "double": lambda m: [m.double() is m, used(m)],
    "eval": lambda m: [m.eval() is m, used(m)],
    "extra_repr": lambda m: m.extra_repr(),
    "float": lambda m: [m.float() is m, used(m)],
    "forward": lambda m: [m.forward(torch.ones(4, 8)), str(inspect.signature(m.forward))],
    "get_buffer": lambda m: m.get_buffer("angles"),
    "get_extra_state": lambda m: m.get_extra_state(),
    "get_parameter": lambda m: m.get_parameter("up.weight"),
    "get_submodule": lambda m: m.get_submodule("up"),
    "half": lambda m: [m.half() is m, used(m)],
    "load_state_dict": load,
    "modules": lambda m: list(m.modules()),
    "named_buffers": lambda m: dict(m.named_buffers()),
    "named_children": lambda m: dict(m.named_children()),
    "named_modules": lambda m: dict(m.named_modules()),
    "named_parameters": lambda m: dict(m.named_parameters()),
    "parameters": lambda m: list(m.parameters()),
    "register_backward_hook": None,
    "register_buffer": lambda m: [
        m.register_buffer("more", torch.ones(2), persistent=False),
        used(m),
        dict(m.named_buffers()),
    ],
    "register_forward_hook": hooked("register_forward_hook"),
    "register_forward_pre_hook": hooked("register_forward_pre_hook"),
    "register_full_backward_hook": hooked("register_full_backward_hook"),
    "register_full_backward_pre_hook": hooked("register_full_backward_pre_hook"),
    "register_load_state_dict_post_hook": lambda m: [
        m.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.append("mine"))
        is None,
        list(m.load_state_dict(m.state_dict(), strict=False).missing_keys),
    ],
    "register_load_state_dict_pre_hook": lambda m: [
        m.register_load_state_dict_pre_hook(lambda module, state, *_: state.pop("steps", None))
        is None,
        list(m.load_state_dict(m.state_dict(), strict=False).missing_keys),
    ],
    "register_module": lambda m: [m.register_module("third", nn.ReLU()), list(m._modules)],
    "register_parameter": lambda m: [m.register_parameter("none", None), used(m)],
    "register_state_dict_post_hook": lambda m: [
        m.register_state_dict_post_hook(lambda module, state, *_: state.__delitem__("steps"))
        is None,
        list(m.state_dict()),
    ],
    "register_state_dict_pre_hook": lambda m: [
        m.register_state_dict_pre_hook(lambda module, *_: setattr(module, "kind", "saved")) is None,
        m.state_dict(),
        m.kind,
    ],
    "requires_grad_": lambda m: [m.requires_grad_(False) is m, used(m)],
    "set_extra_state": lambda m: [m.set_extra_state({"a": 1}), m.loaded],
    "set_submodule": lambda m: [m.set_submodule("down", nn.Identity()), list(m.state_dict())],
    "state_dict": lambda m: [m.state_dict(), m.state_dict(prefix="a."), m.saved],
    "to": lambda m: [m.to(torch.float64) is m, used(m)],
    "to_empty": lambda m: [m.to_empty(device="cpu") is m, list(m.state_dict())],
    "train": lambda m: [m.train(False) is m, used(m), m.train() is m, m.training],
    "type": lambda m: [m.type(torch.float64) is m, used(m)],
    "zero_grad": lambda m: [
        m(torch.ones(4, 8)).sum().backward(),
        m.zero_grad(),
        [p.grad for p in m.parameters()],
    ],
}
ELSEWHERE = {
    "compile": "a wrapped module is compiled by its backend",
    "cuda": "no such device here",
    "ipu": "no such device here",
    "mtia": "no such device here",
    "register_backward_hook": "deprecated by torch, for modules of one operation",
    "share_memory": "processes of one host; shards are of one process",
    "xpu": "no such device here",
}


@distributed(MESH)
def test_every_public_method_of_a_module(mesh):
    public = {name for name in vars(nn.Module) if not name.startswith("_")} - {
        "T_destination",
        "call_super_init",
        "dump_patches",
    }
    assert public <= QUESTIONS.keys() | ELSEWHERE.keys(), public - QUESTIONS.keys()
    for name in sorted(public - ELSEWHERE.keys()):
        model, plain = both(mesh)
        try:
            same(QUESTIONS[name](model), QUESTIONS[name](plain))
        except Exception as error:
            raise AssertionError(name) from error


@distributed(MESH)
def test_the_class_of_a_model(mesh):
    model, plain = both(mesh)
    x = torch.randn(4, 8)
    assert isinstance(model, Model) and (model.kind, len(model)) == ("small", 2)
    assert model["up"] is model.up and type(model.another()) is Model
    close(model.twice(x), plain.twice(x))
    assert {"up", "twice", "loaded"} <= set(dir(model))
    copied = copy.deepcopy(model)
    assert copied.up is not model.up
    close(copied.twice(x), plain.twice(x))


@distributed(MESH)
def test_optimizers_are_carried_over(mesh):
    for kind in (torch.optim.AdamW, torch.optim.LBFGS):
        torch.manual_seed(0)
        plain = Model()
        model = copy.deepcopy(plain)
        gspmd.annotate(model, mesh, {"up.weight": "data _"})
        optimizers = [kind(m.parameters(), lr=0.1) for m in (model, plain)]
        x = torch.randn(4, 8)

        def step(m, optimizer, x=x):
            def loss():
                optimizer.zero_grad()
                value = m(x).square().sum()
                value.backward()
                return value

            optimizer.step(loss)

        step(model, optimizers[0]), step(plain, optimizers[1])
        model = gspmd.parallelize(model, mesh)
        if kind is torch.optim.AdamW:  # LBFGS keeps one vector of all parameters
            for _ in range(3):
                step(model, optimizers[0]), step(plain, optimizers[1])
            same([*model.parameters()], [*plain.parameters()])
            moments = optimizers[0].state[model.up.weight]["exp_avg"]
            assert moments.placements == model.up.weight.placements
        else:
            assert all(a is b for a, b in zip(optimizers[0]._params, model.parameters()))


@distributed(MESH)
def test_marks_come_before_parallelize(mesh):
    model, _ = both(mesh)
    assert error_of(lambda: gspmd.annotate(model, mesh, {"down.weight": "data _"})).startswith(
        "a tensor that is on a mesh already is marked 'data _'"
    )
    gspmd.annotate(model, mesh, {"up.weight": "data _"})  # it is so


@distributed(MESH)
def test_weights_without_a_mark_are_stored_as_a_plan_lays_them_out(mesh):
    torch.manual_seed(0)
    plain, x = Model(), torch.randn(4, 8)
    model = copy.deepcopy(plain)
    gspmd.annotate(model, mesh, {"up.weight": "data _"})
    plan = gspmd.plan(model, x, mesh=mesh, grad=True)
    for other, text in (
        (gspmd.plan(plain, x, mesh=gspmd.Mesh(model=2)), "the plan is for mesh model=2"),
        (gspmd.plan(Model(4), torch.ones(2, 4), mesh=mesh), "the plan has a weight 'up.weight'"),
    ):
        error = error_of(lambda other=other: gspmd.parallelize(model, mesh, plan=other))
        assert error.startswith(text), error
    model = gspmd.parallelize(model, mesh, plan=plan)
    assert str(model.down.weight.placements) == "(Shard(dim=1),)"
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (model, plain)]
    for m, optimizer in zip((model, plain), optimizers):
        m(x).square().sum().backward()
        optimizer.step()
    same([*model.parameters()], [*plain.parameters()])
    assert model.plan.sent_bytes == plan.sent_bytes


@distributed(MESH)
def test_data_parallel_around_a_module_on_a_mesh(mesh):
    model, _ = both(mesh)
    text = error_of(lambda: nn.parallel.DistributedDataParallel(model))
    assert text.startswith("DistributedDataParallel is around a module on a mesh")


@distributed(MESH)
def test_fully_shard_around_a_module_on_a_mesh(mesh):
    arounds = (lambda m: m, lambda m: m.up, lambda m: nn.Sequential(nn.Linear(8, 8), m))
    for around in arounds:  # torch 2.9 takes a module that was refused for a sharded one
        outer = around(both(mesh)[0])
        text = error_of(lambda outer=outer: fully_shard(outer, mesh=init_device_mesh("cpu", (2,))))
        assert text.startswith("fully_shard (FSDP2) is around a module on a mesh")
    model, _ = both(mesh)
    beside = nn.Sequential(nn.Linear(8, 8), model)
    fully_shard(beside, mesh=init_device_mesh("cpu", (2,)), ignored_params={*model.parameters()})
    beside(torch.ones(4, 8)).sum().backward()
    assert all(p.grad is not None for p in beside.parameters())


class Both(Model):
    """A model that returns its loss beside its logits."""

    def forward(self, x):
        logits = super().forward(x)
        return {"loss": logits.square().mean(), "logits": logits}


MARKED = {"up.*": "model ?", "up.bias": "model", "down.weight": "_ model", "down.bias": "_"}


@distributed("data=2", "data=2,model=2")
def test_a_printed_plan_is_the_program_that_runs(mesh):
    """With one default for results: whole and plain, as on one device."""
    marks = MARKED if "model" in mesh.names else {"*.weight": "_ data", "*.bias": "_"}
    for case in (
        (Model, False, "auto", None, True),
        (Model, False, "auto", "same", False),
        (Model, True, None, None, True),
        (Both, True, "auto", None, False),
        (Both, False, "auto", None, True),
        (Both, True, None, "same", True),
    ):
        kind, marked, in_specs, out_specs, grad = case
        torch.manual_seed(0)
        model, x = kind(), torch.randn(8, 8)
        if marked:
            gspmd.annotate(model, mesh, marks)
        specs = {"in_specs": in_specs, "out_specs": out_specs}
        with warnings.catch_warnings(), torch.set_grad_enabled(grad):
            warnings.simplefilter("ignore")
            expected = model(x)
            plan = gspmd.plan(
                model, x, mesh=mesh, grad=grad, advanced={"unmarked": "replicated"}, **specs
            )
            model = gspmd.parallelize(model, mesh, **specs)
            found = model(x)
        assert plan.text() == model.plan.text(), (case, plan.text(), model.plan.text())
        leaves = [*found.values()] if isinstance(found, dict) else [found]
        assert out_specs or not any(isinstance(leaf, DTensor) for leaf in leaves), case
        same(found, expected)


@distributed(MESH)
def test_one_warning_of_what_no_mark_asks_for(mesh):
    blocks = (nn.Linear(256, 256, bias=False), nn.LayerNorm(256))
    for options, expected in (({}, 1), ({"shard_updates": "data"}, 0), ({"in_specs": "data _"}, 0)):
        model = nn.Sequential(*copy.deepcopy(blocks), nn.Linear(256, 256, bias=False))
        gspmd.annotate(model, mesh, {"0.weight": "data _", "2.weight": "data _"})
        model = gspmd.parallelize(model, mesh, out_specs="data _", **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for rows in (8192, 8192, 4096):
                model(torch.ones(rows, 256))
        texts = [str(each.message) for each in caught if "no mark asks" in str(each.message)]
        assert len(texts) == (expected if dist.get_rank() == 0 else 0), texts
        assert all("256.00 KiB  weight '0.weight', against its mark" in text for text in texts)
        assert len(model.plan.replicated_ops) == expected


@distributed("data=2")
def test_a_large_result_that_is_gathered_is_said_once(mesh):
    """With its bytes and the cure, which says nothing."""
    x = torch.ones(64, 16)
    for out_specs, count in ((None, 1), ("same", 0)):
        model = gspmd.parallelize(
            nn.Linear(16, 10000), mesh, in_specs="data _", out_specs=out_specs
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model(x).sum().backward()
        said = [str(w.message) for w in caught if "gathered for the caller" in str(w.message)]
        assert len(said) == (count if dist.get_rank() == 0 else 0), said
        assert all("1.22 MiB" in text and 'out_specs="same"' in text for text in said), said
