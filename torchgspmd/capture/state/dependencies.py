"""The list of all that a captured program depends on, one row a dependency.

    the guards of a wrapped module      runtime/module_proxy.py, at every call
    plan.simulate                       run_guards.py
    a plan's text and its key           compiler/plan_cache/, in another process
    the account of ranks that differ    runtime/sharded_module.py
    the list in docs/design.md          a test compares it

All read the rows here, so that a new row is compared everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ...compat.private_apis import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)
from ...layout.mark import recorded_mark

T = TypeVar("T")


def with_tensors(module: nn.Module, tensors: Mapping[str, Tensor], call: Callable[[], T]) -> T:
    """Call a function while these tensors replace a module's parameters and buffers, by name.

    A tensor with several names is replaced under all of them.
    """
    # Not torch.func.functional_call: it visits the slot of a module with two names twice, and
    # restores the stand-in there.
    slots: list[tuple[Any, str, Tensor]] = [
        (table, name, tensor)
        for each in module.modules()
        for table in (each._parameters, each._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]
    present = dict(named_tensors(module))
    stand_ins = {id(present[name]): tensor for name, tensor in tensors.items()}
    slots = [slot for slot in slots if id(slot[2]) in stand_ins]
    try:
        for table, name, tensor in slots:
            table[name] = stand_ins[id(tensor)]
        return call()
    finally:
        for table, name, tensor in slots:
            table[name] = tensor


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return parameters and buffers under all their names."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def slot_of(model: nn.Module, name: str) -> tuple[dict, str]:
    """Return the table (dict) that holds a parameter or buffer, and its name in it."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    return (owner._parameters if last in owner._parameters else owner._buffers), last


Fact = tuple[str, Any]  # what is compared, and its value: by identity, or by equality if plain
# At every call, by the key under which a wrapped module keeps its programs.
CALL = "call"
# When one of these tables has other entries: by that key, too.
TABLES = "tables"
# At every call, by guards of each program.
GUARDS = "guards"
# When a process takes a plan that another has made.
START = "start"


class Dependency(NamedTuple):
    """A kind of state that a program depends on.

    compared: CALL, TABLES, GUARDS or START. tables: a module's attributes whose entries lead to it.
    facts: a module's values, for the rows about modules.
    """

    name: str
    meaning: str
    compared: str
    tables: tuple[str, ...] = ()
    facts: Callable[[nn.Module], Iterator[Fact]] | None = None


def _named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules under all their names: which are shared decides the program."""
    modules = model.named_modules(remove_duplicate=False)
    return [(name or "the model", module) for name, module in modules]


def _modules(model: nn.Module) -> Iterator[Fact]:
    for name, module in _named(model):
        yield f"module '{name}'" if module is not model else name, module


def _classes(model: nn.Module) -> Iterator[Fact]:
    for name, module in _named(model):
        yield f"the class of {name}", type(module)


def _hooks(table: str) -> Callable[[nn.Module], Iterator[Fact]]:
    """Return the reader of a table of hooks, each with its flags."""

    def facts(model: nn.Module) -> Iterator[Fact]:
        for name, module in _named(model):
            flags = [vars(module).get(f"{table}_{flag}", ()) for flag in _FLAGS]
            kind = module._is_full_backward_hook if table == "_backward_hooks" else None
            hooks = [(hook, kind, *(i in f for f in flags)) for i, hook in _items(module, table)]
            yield f"the {table.strip('_').replace('_', ' ')} of {name}", tuple(hooks)

    return facts


def _items(module: nn.Module, table: str) -> Iterator[tuple[int, Any]]:
    yield from getattr(module, table).items()


def _global_hooks(_: nn.Module) -> Iterator[Fact]:
    for name, table in GLOBAL_HOOKS.items():
        yield f"the {name} of all modules", tuple(filter(_is_of_user, table.values()))


def _is_of_user(hook: Any) -> bool:
    """Return whether a hook may change values: torch's own, as FlopCounterMode's, only observe."""
    return not str(getattr(hook, "__module__", None)).startswith("torch.")


def has_global_hooks() -> bool:
    """Return whether torch's `register_module_*_hook` was called by others than torch."""
    return any(_is_of_user(hook) for table in GLOBAL_HOOKS.values() for hook in table.values())


def _modes(model: nn.Module) -> Iterator[Fact]:
    for name, module in _named(model):
        yield f"the mode of {name}", "train" if module.training else "eval"


def _kinds(model: nn.Module) -> Iterator[Fact]:
    for name, t in named_tensors(model):
        kind = "parameter" if isinstance(t, nn.Parameter) else "buffer"
        yield (
            f"the kind of {name}",
            str((kind, tuple(t.shape), t.dtype, getattr(t, "placements", None))),
        )


def _requires_grad(model: nn.Module) -> Iterator[Fact]:
    for name, t in named_tensors(model):
        yield f"requires_grad of {name}", str(t.requires_grad)


def _shared(model: nn.Module) -> Iterator[Fact]:
    first: dict[int, str] = {}
    for name, t in named_tensors(model):
        yield f"the tensor of {name}", f"that of {first.setdefault(id(t), name)}"


def _places(model: nn.Module) -> Iterator[Fact]:
    for name, t in named_tensors(model):
        mark = recorded_mark(t)
        yield f"the mark and device of {name}", str((mark and mark[:2], t.device.type))


GLOBAL_HOOKS: dict[str, dict] = {
    "forward hooks": _global_forward_hooks,
    "forward pre hooks": _global_forward_pre_hooks,
    "backward hooks": _global_backward_hooks,
    "backward pre hooks": _global_backward_pre_hooks,
}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FLAGS = ("with_kwargs", "always_called")
_TENSORS = ("_parameters", "_buffers")

DEPENDENCIES = (
    # the model
    Dependency(
        "submodules",
        "which modules the model has, under which names, and which of them are shared",
        TABLES,
        ("_modules",),
        _modules,
    ),
    Dependency("classes", "the class of each module", TABLES, (), _classes),
    Dependency(
        "kinds of tensors",
        "name, shape, dtype and layout of each parameter and buffer",
        TABLES,
        _TENSORS,
        _kinds,
    ),
    Dependency(
        "shared tensors",
        "which names of parameters and buffers have one tensor",
        TABLES,
        _TENSORS,
        _shared,
    ),
    *(
        Dependency(
            table.strip("_").replace("_", " "),
            "those of each module, with their flags",
            TABLES,
            (table,),
            _hooks(table),
        )
        for table in HOOKS
    ),
    Dependency(
        "hooks of all modules",
        "torch's `register_module_forward_hook` and the like",
        TABLES,
        (),
        _global_hooks,
    ),
    Dependency("modes", "`training` of each module", CALL, (), _modes),
    Dependency(
        "trained tensors", "`requires_grad` of each parameter and buffer", CALL, (), _requires_grad
    ),
    Dependency("marks", "mark and device of each parameter and buffer", START, (), _places),
    # the code
    Dependency(
        "methods",
        "functions, properties and class methods in the classes of modules and of objects that "
        "forward reaches, in classes that it names, and in their bases",
        GUARDS,
    ),
    Dependency(
        "functions",
        "code and defaults of the functions that forward and hooks lead to, and torch's functions "
        "that these or torch's modules name",
        GUARDS,
    ),
    # values
    Dependency(
        "attributes and variables",
        "those that were read: of modules, classes and objects; global ones and those of closures",
        GUARDS,
    ),
    Dependency("buffer values", "where the program branches on one", GUARDS),
    Dependency(
        "arguments",
        "their structure; numbers, texts and objects by value; shape, dtype, layout, "
        "`requires_grad` and mark of tensors",
        CALL,
    ),
    Dependency("torch's modes", "gradients, autocast with its dtype, and the default dtype", CALL),
    # another process
    Dependency(
        "settings",
        "deterministic algorithms, precision of products, attention backends, `TORCHGSPMD_*`; "
        "within a process each run obeys them",
        START,
    ),
    Dependency("options", "those of `parallelize`, and the mesh", START),
    Dependency(
        "versions", "of Python, torch, this library, installed packages and the user's files", START
    ),
)
# A module's tables, whose entries are compared at every call.
WATCHED = tuple(dict.fromkeys(name for row in DEPENDENCIES for name in row.tables))


def facts_of(model: nn.Module, *compared: str) -> Iterator[Fact]:
    """Yield a model's facts, from the rows that are compared so."""
    for row in DEPENDENCIES:
        if row.facts is not None and row.compared in compared:
            yield from row.facts(model)


def hooks_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the hooks of modules, and those of all modules."""
    tables = [getattr(module, table) for module in modules for table in HOOKS]
    return [hook for table in (*tables, *GLOBAL_HOOKS.values()) for hook in table.values()]


class HookTables:
    """The hooks that modules had, so that a second trace registers no hook again."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        flags = [f"{table}_{flag}" for table in HOOKS for flag in _FLAGS]
        tables = [vars(module).get(name) for module in modules for name in (*HOOKS, *flags)]
        self.tables = [(table, dict(table)) for table in tables if table is not None]

    def restore(self) -> None:
        for table, before in self.tables:
            if table != before:
                table.clear()
                table.update(before)


def torch_modes(device_type: str) -> tuple[Any, ...]:
    """Return the modes of torch that a program depends on, in the order of TORCH_MODES."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.get_default_dtype(),
    )


TORCH_MODES = (
    "torch.is_grad_enabled()",
    "torch.is_autocast_enabled()",
    "torch.get_autocast_dtype()",
    "torch.get_default_dtype()",
)
