"""State that a simulated plan depends on: each value has to be as it was during planning.

    plan = torchgspmd.plan(model, x, 0.5, mesh=mesh)
    plan.simulate(x, 0.7)               an argument
    model.eval(); plan.simulate(x, 0.5) a module's mode
    f.__defaults__ = (0.7,)             a default

Every run reads parameters and buffers by their names, and attributes that forward reads have
guards (guards.py). A wrapped model has the rest in its program cache's keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...rules.registry import order_text
from .bytecode_names import cell_sources, global_sources, is_installed, is_own
from .dependencies import CALL, TABLES, facts_of
from .methods import Methods
from .recorder import Reach
from .source import DEEP, Source, is_table
from .value_keys import as_text, difference, value_key

_NONE = value_key(None)


class Change(NamedTuple):
    """A value that differs from the plan's. now, then: as texts."""

    name: str
    now: str
    then: str

    def __str__(self) -> str:
        return f"{self.name} is {self.now}, and was {self.then}"


class ArgumentKeys(NamedTuple):
    """Names for the leaves of a plan's arguments, and their keys.

    A tensor's is None, or its order in memory, if the program asks for that.
    """

    names: tuple[str, ...]
    keys: tuple[Any, ...]
    ordered: bool = False

    @staticmethod
    def of_file(names: Sequence[str], leaves: Iterable[object]) -> ArgumentKeys:
        """Return keys for leaves that have None in place of tensors."""
        keys = tuple(None if leaf is None else value_key(leaf) for leaf in leaves)
        return ArgumentKeys(tuple(names), keys)

    @staticmethod
    def of(names: Sequence[str], leaves: Iterable[object], ordered: bool = False) -> ArgumentKeys:
        def key(leaf: object) -> object:
            if not isinstance(leaf, Tensor):
                return value_key(leaf)
            return order_text(leaf) if ordered else None

        return ArgumentKeys(tuple(names), tuple(map(key, leaves)), ordered)

    def changes(self, leaves: Sequence[object]) -> Iterator[Change]:
        now = ArgumentKeys.of(self.names, leaves, self.ordered)
        for name, one, other in zip(self.names, now.keys, self.keys):
            # A saved plan has None for tensors and for None.
            if one != other and not (other is None and one == _NONE):
                path, *texts = difference(one, other)
                tensor = (
                    "a tensor" if key is None else text for key, text in zip((one, other), texts)
                )
                yield Change(f"argument '{name}'{path}", *tensor)


class ModuleFacts:
    """A model's modules, hooks, modes and tensors, by the rows of dependencies.py."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.then = dict(self._facts())

    def _facts(self) -> Iterator[tuple[str, object]]:
        yield from facts_of(self.module, TABLES, CALL)

    def described(self) -> list[list[str]]:
        """Return names and values at planning time, the same texts in every process."""
        return [[name, _text(value)] for name, value in self.then.items()]

    def changes(self) -> Iterator[Change]:
        now = dict(self._facts())
        for name in dict.fromkeys((*self.then, *now)):
            one, other = now.get(name, "absent"), self.then.get(name, "absent")
            if one is not other and one != other:
                yield Change(name, _text(one), _text(other))

    def tensors(self) -> list[Tensor]:
        """Return the parameters and buffers that the module has now, by their first names."""
        return [
            *dict(self.module.named_parameters()).values(),
            *dict(self.module.named_buffers()).values(),
        ]


def module_description(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield name and value for a model's facts.

    Names and values are the same in every process.
    """
    for name, value in facts_of(module, TABLES, CALL):
        if not isinstance(value, nn.Module):
            yield name, _text(value)


class FunctionFacts:
    """The code that a program has run: methods, functions' code and defaults.

    For a plain function also its variables: a module's have guards already. besides: sources that a
    run reads or writes itself.
    """

    def __init__(
        self, reach: Reach | None, is_module: bool = True, besides: Iterable[Source] = ()
    ) -> None:
        called = reach.called if reach is not None else []
        self.functions = [f for f in called if not is_installed(f.__module__)]
        self.methods = Methods(reach.classes() if reach is not None else (), called)
        self.variables = [] if is_module else [*self._variables({*besides})]
        self.then = [*self._facts()]
        of_plain = [f for f in self.functions if _has_plain_defaults(f)]
        # compared without looking into
        self.constant = [(f, f.__defaults__, f.__code__) for f in of_plain]
        self.is_constant = len(of_plain) == len(self.functions) and not self.variables

    def hold(self) -> bool:
        """Return whether nothing differs from planning time."""
        # Plain defaults are immutable: one tuple always has the same values.
        for f, defaults, code in self.constant:
            if f.__defaults__ is not defaults or f.__kwdefaults__ or f.__code__ is not code:
                return False
        if not self.methods.hold():
            return False
        return self.is_constant or next(self.changes(), None) is None

    def _variables(self, besides: set[Source]) -> Iterator[Source]:
        """Yield the globals and closure variables that the functions read.

        Tables that runs write have guards.
        """
        written = {id(source.root) for source in besides}
        for function in self.functions:
            if is_own(function.__module__):
                for source in (*global_sources(function), *cell_sources(function)):
                    if source.entry not in besides and not _reaches(source.read(), written):
                        yield source

    def _facts(self) -> Iterator[tuple[str, object]]:
        for f in self.functions:
            name = f"the defaults of {f.__module__}.{f.__qualname__}:{f.__code__.co_firstlineno}"
            yield name, value_key((f.__defaults__, f.__kwdefaults__))
            yield f"the code of {f.__module__}.{f.__qualname__}", f.__code__
        for source in self.variables:
            yield str(source), value_key(source.read())

    def changes(self) -> Iterator[Change]:
        yield from (Change(*change) for change in self.methods.changes())
        for (name, now), (_, then) in zip(self._facts(), self.then):
            if then != now:
                path, *texts = difference(now, then)
                yield Change(name + path, *texts)


def _reaches(value: Any, written: set[int], depth: int = 0) -> bool:
    """Return whether a table is among these, by id, or contains one."""
    if not (isinstance(value, tuple) or is_table(value)) or depth > DEEP:
        return False
    items = value.values() if isinstance(value, dict) else value
    return id(value) in written or any(_reaches(item, written, depth + 1) for item in items)


def _has_plain_defaults(function: FunctionType) -> bool:
    """Return whether one tuple of defaults always has the same values."""
    plain = (bool, int, float, complex, str, bytes, type(None))
    return not function.__kwdefaults__ and all(
        isinstance(each, plain) for each in function.__defaults__ or ()
    )


class RunGuards(NamedTuple):
    """The state at planning time, with which a run is compared."""

    arguments: ArgumentKeys
    module: ModuleFacts | None
    functions: FunctionFacts

    def changes(self, leaves: Sequence[object]) -> Iterator[Change]:
        yield from self.arguments.changes(leaves)
        if self.module is not None:
            yield from self.module.changes()
        yield from self.functions.changes()


def _text(value: object) -> str:
    if isinstance(value, nn.Module):
        return f"a {type(value).__qualname__} of its own"
    return value if isinstance(value, str) else as_text(getattr(value, "__qualname__", value))
