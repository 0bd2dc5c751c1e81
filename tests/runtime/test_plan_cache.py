"""Plans in a folder: a second start does not plan, and takes nothing that is not its own."""

import hashlib
import inspect
import logging
import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchgspmd as gspmd
from torchgspmd.compiler.plan_cache import decoder, plans, values
from torchgspmd.compiler.plan_cache import files as cache_files
from torchgspmd.runtime.sharded_module import ShardedModule

SCALE = 1.0
LOG = logging.getLogger("test_plan_cache")
TABLE = torch.ones(4)


class Net(nn.Module):
    def __init__(self, width: int = 4, mesh: gspmd.Mesh | None = None, mark: str = "_ _"):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)
        self.mesh, self.options = mesh or gspmd.Mesh(data=1), {"scale": 2.0}
        gspmd.mark_sharding(self.up.weight, self.mesh, mark)

    def forward(self, x):
        y = torch.relu(self.up(x)) * self.options["scale"] * SCALE
        return self.down(y + torch.tensor([0.5]))


class Mean(Net):
    def forward(self, x):
        return super().forward(x).mean()


class Counts(Net):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class Logs(Net):
    def forward(self, x):
        LOG.debug("forward")  # LOG remembers that it is not enabled for this
        return super().forward(x)


class ReadsATensor(Net):
    def forward(self, x):
        return super().forward(x * TABLE)


class ReadsTheEnvironment(Net):
    def forward(self, x):
        return super().forward(x) * float(os.environ.get("FACTOR", "1"))


class Imports(Net):
    def forward(self, x):
        import conftest  # noqa: F401

        return super().forward(x)


class Doubled:
    """An object without attributes."""

    def __call__(self, x):
        return x * 2


class Recurrent(Net):
    """An LSTM has its parameters in a list, too."""

    def __init__(self):
        super().__init__()
        self.cells, self.process = nn.LSTM(4, 4), Doubled()

    def forward(self, x):
        return super().forward(self.process(self.cells(x)[0]))


class ComparesLengths(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 6)

    def forward(self, x):
        y = self.up(x).relu()
        if x.shape[0] > 40:
            return y * 3
        return y * 2 if x.shape[0] > 10 else y - 1


@pytest.fixture(autouse=True)
def one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHGSPMD_CACHE", str(tmp_path / "plans"))
    # The main module of a worker of xdist has no file.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def planned(monkeypatch):
    """A list that has an entry for each time that a process has planned."""
    calls, plan_here = [], ShardedModule._plan_here

    def counted(self, call, before_talk):
        calls.append(call)
        return plan_here(self, call, before_talk)

    monkeypatch.setattr(ShardedModule, "_plan_here", counted)
    return calls


def start(model: nn.Module, mesh: gspmd.Mesh | None = None) -> nn.Module:
    """Run a step of a model as a new process would; compare it with the plain model."""
    x = torch.arange(12.0).view(3, 4)
    plain = type(model)()
    plain.load_state_dict(model.state_dict())
    plain.to(next(model.parameters()).dtype).options = dict(model.options)
    x = x.to(next(model.parameters()).dtype)
    plain(x).sum().backward()
    sharded = gspmd.parallelize(model, mesh or gspmd.Mesh(data=1))
    result = sharded(x)
    result.sum().backward()
    assert result.equal(plain(x)) or isinstance(model, Counts)
    for mine, theirs in zip(sharded.parameters(), plain.parameters()):
        assert mine.grad.full_tensor().equal(theirs.grad)
    return sharded


def files(tmp_path):
    return [*(tmp_path / "plans").glob("*")]


def test_the_second_start_does_not_plan(planned, tmp_path):
    first = start(Net())
    (file,) = files(tmp_path)
    second = start(Net())
    assert len(planned) == 1 and len(files(tmp_path)) == 1 and file.stat().st_mode & 0o077 == 0
    assert str(second.plan) == str(first.plan)
    assert second.plan.program.code == first.plan.program.code
    assert second.plan.replicated_ops == first.plan.replicated_ops
    assert second.plan.estimate().seconds == first.plan.estimate().seconds
    with pytest.raises(gspmd.ShardingError, match="planned by another process"):
        second.plan.explain("linear")
    second.options["scale"] = 3.0  # what forward reads is guarded as after a capture
    second(torch.ones(3, 4))
    assert len(planned) == 2


DAMAGES = {
    "a changed byte": lambda text: text.replace(b"relu", b"tanh"),
    "half of it": lambda text: text[: len(text) // 2],
    "nothing": lambda text: b"",
    "no plan": lambda text: with_checksum(text.split(b"\n")[1], b"{}"),
    "two lines of three": lambda text: with_checksum(*text.split(b"\n")[1:-1]),
    "another key": lambda text: with_checksum(b'"another"', *text.split(b"\n")[2:]),
    "an unknown operator": lambda text: with_checksum(
        text[65:].replace(b"aten.relu.default", b"aten.nothing.default")
    ),
}


def with_checksum(*lines: bytes) -> bytes:
    text = b"\n".join(lines)
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_not_taken(planned, tmp_path, damage):
    start(Net())
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(DAMAGES[damage](whole))
    assert file.read_bytes() != whole
    start(Net())
    assert len(planned) == 2 and len(files(tmp_path)) == 1
    start(Net())
    assert len(planned) == 2


def others_may_write_a_file(folder):
    next(folder.glob("*.json")).chmod(0o666)


def others_may_write_the_folder(folder):
    folder.chmod(0o777)


def the_folder_is_a_link(folder):
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


def a_file_is_a_link(folder):
    file = next(folder.glob("*.json"))
    file.rename(folder / "elsewhere")
    file.symlink_to("elsewhere")


def others_may_write_the_secret(folder):
    folder.with_name("plans.secret").chmod(0o622)


def the_secret_is_another(folder):
    folder.with_name("plans.secret").write_bytes(bytes(32))


def a_file_is_a_pipe(folder):
    file = next(folder.glob("*.json"))
    file.unlink()
    os.mkfifo(file, 0o600)


UNSAFE = {
    others_may_write_a_file: "another user has it, or may write it",
    others_may_write_the_folder: "another user has it, or may write it",
    the_folder_is_a_link: "it is a link",
    a_file_is_a_link: "it is a link",
    others_may_write_the_secret: "another user has it, or may write it",
    the_secret_is_another: "it was changed, or another user wrote it",
    a_file_is_a_pipe: "it is no regular file",
}


@pytest.mark.parametrize("change", UNSAFE, ids=lambda change: change.__name__)
def test_what_others_may_write_is_not_taken(planned, tmp_path, caplog, change):
    caplog.set_level("INFO", "torchgspmd")
    start(Net())
    change(tmp_path / "plans")
    start(Net())
    assert len(planned) == 2
    assert any(UNSAFE[change] in record.getMessage() for record in caplog.records)


def test_the_secret_is_in_a_folder_that_alone_may_be_written(planned, tmp_path, monkeypatch):
    real = cache_files._replace

    def replace(file, *args, **options):
        if file.name == "plans.secret":
            raise PermissionError
        return real(file, *args, **options)

    monkeypatch.setattr(cache_files, "_replace", replace)
    start(Net())
    start(Net())
    assert len(planned) == 1 and (tmp_path / "plans" / ".secret").stat().st_mode & 0o077 == 0


def test_a_checksum_without_the_secret_is_none(planned, tmp_path):
    """A plan that computes something else, with the checksum that anyone can compute."""
    start(Net())
    (file,) = files(tmp_path)
    text = file.read_bytes()
    file.write_bytes(with_checksum(text[65:].replace(b"aten.relu.default", b"aten.tanh.default")))
    assert file.read_bytes() != text
    start(Net())
    assert len(planned) == 2


def other_scale(monkeypatch):
    model = Net()
    model.options["scale"] = 4.0
    return model, None


def other_global(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 0.5)
    return Net(), None


def other_marks(monkeypatch):
    return Net(mark="data _"), None


def other_mesh(monkeypatch):
    mesh = gspmd.Mesh(model=1)
    return Net(mesh=mesh), mesh


def other_version(monkeypatch):
    monkeypatch.setattr(cache_files.torch, "__version__", torch.__version__ + "1")
    return Net(), None


def other_code(monkeypatch):
    monkeypatch.setattr(cache_files, "_checksum", lambda file, time: "another")
    return Net(), None


def other_dtype(monkeypatch):
    return Net().double(), None


def other_hook(monkeypatch):
    model = Net()
    model.up.register_forward_hook(lambda *_: None)
    return model, None


def other_setting(monkeypatch):
    monkeypatch.setenv("TORCHGSPMD_SOMETHING", "1")
    return Net(), None


OTHERS = [
    other_scale,
    other_global,
    other_marks,
    other_mesh,
    other_version,
    other_code,
    other_dtype,
    other_hook,
    other_setting,
]


@pytest.mark.parametrize("other", OTHERS)
def test_where_anything_differs_it_plans(planned, other, monkeypatch):
    start(Net())
    start(*other(monkeypatch))
    assert len(planned) == 2


def test_options_of_parallelize_are_in_the_key(planned):
    """All of them, also those that are still to come."""
    start(Net())
    others = {
        "in_specs": "data _",
        "out_specs": "data _",
        "param_dtype": torch.float32,
        "reduce_dtype": torch.float32,
        "advanced.rng": "native",
        "advanced.regather": "always",
        "advanced.skip_passes": ("bucket",),
        "advanced.costs": {"tie_break": 0.5},
        "strict": True,
        "check.verify": True,
        "hardware": "h100",
        "memory.recompute": "auto",
        "memory.offload": "activations",
        "memory": "1GiB",
    }
    neither = {"model", "mesh", "backend", "shard_updates", "plan", "check", "advanced"}
    neither.add("microbatches")  # below
    missing = inspect.signature(gspmd.parallelize).parameters.keys() - others.keys() - neither
    assert missing <= {"timeout", "dynamic", "communication"}, missing
    for count, (name, value) in enumerate(others.items(), 2):
        group, _, setting = name.partition(".")
        options = {group: {setting: value} if setting else value}
        gspmd.parallelize(Net(), gspmd.Mesh(data=1), **options)(torch.ones(3, 4))
        assert len(planned) == count, name
    for count, parts in enumerate((1, 3), len(planned) + 1):  # for a model with a loss
        gspmd.parallelize(Mean(), gspmd.Mesh(data=1), microbatches=parts)(torch.ones(3, 4))
        assert len(planned) == count


@pytest.mark.parametrize("again", [(4, 5, 11, 6, 50, 20), (60, 12, 30, 3, 7, 41)])
def test_a_later_start_takes_the_branch_of_each_size(planned, again):
    """A program is for one outcome of a comparison, and the next start may meet another first."""

    def run(lengths):
        model = gspmd.parallelize(ComparesLengths(), gspmd.Mesh(data=1))
        for length in lengths:
            x = torch.arange(4.0 * length).view(length, 4) / length
            torch.testing.assert_close(model(x), ComparesLengths()(x))

    first = (4, 5, 11, 6, 50, 20)
    for _ in range(2):  # the imports of the first are in the second's key
        run(first)
    count = len(planned)
    run(again)
    assert (len(planned) == count) == (again == first)


def test_the_log_says_why_it_plans(caplog, monkeypatch):
    caplog.set_level("INFO", "torchgspmd")
    start(Net())
    start(Net())
    start(*other_scale(monkeypatch))
    start(ReadsTheEnvironment())
    start(ReadsTheEnvironment())
    folder, *lines = [record.getMessage() for record in caplog.records]
    assert folder.startswith("Net is planned: no plan for it is in /")
    assert lines[0] == (
        "Net is planned: of the plan that was there, "
        "self.options is dict('scale': 4.0), and was dict('scale': 2.0)"
    )
    assert lines[-1] == (
        "ReadsTheEnvironment is planned: ReadsTheEnvironment.forward names os.environ.get"
    )
    assert len(lines) == 4


def test_a_logger_is_no_state(planned):
    for _ in range(2):
        LOG._cache.clear()
        gspmd.parallelize(Logs(), gspmd.Mesh(data=1))(torch.ones(3, 4))
    assert len(planned) == 1


def test_lists_of_parameters_and_objects_without_attributes_are_compared(planned):
    x = torch.arange(12.0).view(3, 4)
    for _ in range(2):
        model = Recurrent()
        want = model(x)
        sharded = gspmd.parallelize(model, gspmd.Mesh(data=1))
        torch.testing.assert_close(sharded(x), want)
        sharded(x)  # guards hold, though the list has other tensors than at the capture
        model.process = lambda x: x
    assert len(planned) == 1


@pytest.mark.parametrize("cls", [Counts, ReadsATensor, ReadsTheEnvironment, Imports])
def test_what_depends_on_more_than_text_is_planned_each_time(planned, cls):
    start(cls())
    start(cls())
    assert len(planned) == 2


def test_an_empty_value_switches_it_off(planned, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHGSPMD_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    start(Net())
    start(Net())
    assert len(planned) == 2 and not [*tmp_path.iterdir()]


def test_the_folder_is_that_of_the_user(planned, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHGSPMD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    start(Net())
    assert len([*(tmp_path / "torchgspmd").iterdir()]) == 1


def test_a_folder_that_cannot_be_written_is_left_out(planned, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHGSPMD_CACHE", str(tmp_path / "file" / "plans"))
    start(Net())
    start(Net())
    assert len(planned) == 2


NO_VALUES = [
    ["function", "os", "system"],
    ["function", "_operator", "methodcaller"],
    ["operator", "os.system"],
    ["operator", "__class__"],
    ["torch", "load"],
    ["kind", "__class__"],
    ["tree", ["os.system", None]],
    ["operator", "aten.from_file.default"],
    ["operator", "aten.add_.Tensor"],
    ["node", -1],
    ["node", 0],
    ["record", True],
    ["tensor", [1 << 40, 1 << 40], [1, 1], ["torch", "float32"], "cpu"],
    ["tensor", [-1], [1], ["torch", "float32"], "cpu"],
    ["tensor", [1], [1], ["torch", "strided"], "cpu"],
    ["dict", [["list"], 1]],
    ["float", "1_0"],
    {"a": 1},
    [],
    [[]],
]


@pytest.mark.parametrize("value", NO_VALUES, ids=str)
def test_a_text_names_nothing_but_parts_of_programs(value):
    with pytest.raises(values.Stale):
        decoder.Decoder([], gspmd.Mesh(data=2)).decode(value)


@pytest.mark.parametrize("mesh", ["data=2,model=2", "model=3"])
def test_a_plan_read_from_its_text_computes_the_same(mesh):
    mesh = gspmd.Mesh.parse(mesh)
    model = Net(8, mesh, "model _")
    x = torch.arange(12.0).view(3, 4)
    plan = gspmd.plan(model, x, mesh=mesh, grad=True)
    text = plans.encode_plan(plan, model)
    again = plans.decode_plan(text, model, mesh, gspmd.Plan)
    assert again.text(full=True) == plan.text(full=True) and again.program.code == plan.program.code
    (one, one_grads), (other, other_grads) = plan.simulate(x), again.simulate(x)
    assert one.equal(other) and all(one_grads[k].equal(other_grads[k]) for k in one_grads)
    with pytest.raises(values.Stale):
        plans.decode_plan(text, nn.Linear(4, 4), mesh, gspmd.Plan)


def test_a_constant_of_a_card_is_in_a_text(monkeypatch):
    """By its values and the type of its device; each process puts it on its own device."""
    model, x = Net(8), torch.arange(12.0).view(3, 4)
    plan = gspmd.plan(model, x, mesh=model.mesh)
    monkeypatch.setattr(plans, "device_type", lambda constant: "cuda")
    text = plans.encode_plan(plan, model)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    again = plans.decode_plan(text, model, model.mesh, gspmd.Plan)
    assert again.simulate(x).equal(plan.simulate(x))  # without a card it is on the CPU
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    again = plans.decode_plan(text, model, model.mesh, gspmd.Plan)
    assert {c.device.type for c in again.captured.constants.buffers()} == {"meta"}
