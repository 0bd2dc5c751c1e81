"""Guards as JSON, and back.

    self.blocks[0].scale            [["module", "blocks.0"], [".scale"]], content 2.0
    global settings.SCALE           [["globals", "settings"], ["SCALE"]], content 0.5
    self.config.layers              [["value", [["module", ""], [".config"]]], [".layers"]]
    def scaled(x, by=2.0)           [["function", "nets", "scaled"], []], its defaults (2.0,)

A process that reads a text looks for each source, and compares the content that is there. Then
the guard is on its own value, as after a capture.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...capture import Captured
from ...capture.state.bytecode_names import function_in, is_installed, is_own
from ...capture.state.guards import (
    ANY,
    Contents,
    Guard,
    Guards,
    HasAttributes,
    TensorPredicate,
    leaves_of,
    snapshot,
    snapshot_components,
)
from ...capture.state.recorder import Reach
from ...capture.state.run_guards import ArgumentKeys, FunctionFacts, ModuleFacts, RunGuards
from ...capture.state.source import ABSENT, LISTS, Attribute, Marker, Source, attributes
from ...capture.state.state_inputs import Conditions
from ...capture.state.value_keys import as_text
from .decoder import typed
from .json_text import Malformed, Stale, Unshareable

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_DEEP = 12  # limit of nesting


class _Bare:
    """A class whose objects have nothing but attributes."""


def content(value: object, modules: Mapping[int, str], depth: int = 0) -> str:
    """Return a value's content as text.

    modules: the names of the model's modules, and of parameters that may be named, by id.

    Raises:
        Unshareable: It cannot be compared, such as a tensor.
    """

    def of(item: object) -> str:
        return content(item, modules, depth + 1)

    # An Enum may derive from int or str: it is written below, with its class.
    if isinstance(value, (*_PLAIN, *_OF_TORCH)) and not isinstance(value, Enum):
        return repr(value)
    if isinstance(value, Marker):
        return f"<{value}>"
    # Objects that refer to each other in a circle end here, too.
    if depth > _DEEP:
        raise Unshareable("it reads deeply nested values")
    if isinstance(value, (Tensor, np.ndarray)):
        if id(value) in modules:
            return f"parameter {modules[id(value)]}"
        raise Unshareable("it reads a tensor that is neither a parameter nor a buffer")
    if isinstance(value, nn.Module):
        return f"module {modules.get(id(value)) or _other(value)}"
    if isinstance(value, (type, BuiltinFunctionType, ModuleType)):
        return (
            f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
        )
    if isinstance(value, MethodType):
        return f"{of(value.__func__)} of {of(value.__self__)}"
    if isinstance(value, functools.partial):
        return f"partial({of(value.func)}, {of(value.args)}, {of(value.keywords)})"
    if isinstance(value, FunctionType):
        return _of_function(value, of)
    if isinstance(value, CellType):
        return "<empty>" if value == CellType() else of(value.cell_contents)
    if isinstance(value, dict):
        entries = ", ".join(f"{of(k)}: {of(v)}" for k, v in value.items())
        return f"{type(value).__qualname__}({entries})"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__qualname__}({', '.join(map(of, value))})"
    if isinstance(value, (set, frozenset)):
        # The order of a set differs between processes, as hashes of strings do.
        return f"{type(value).__qualname__}({', '.join(sorted(map(of, value)))})"
    if isinstance(value, Enum) or not is_own(type(value).__module__):
        return f"{type(value).__qualname__} {as_text(repr(value))}"
    return f"{type(value).__module__}.{type(value).__qualname__}({of(_plain_attributes(value))})"


def _plain_attributes(value: object) -> dict[str, object]:
    table = {step.name: item for step, item in attributes(value).items() if item is not ABSENT}
    # An extension's object may have content besides its attributes; a Python class adds no bytes.
    if not table and type(value).__basicsize__ != _Bare.__basicsize__:
        raise Unshareable(f"it reads a {type(value).__qualname__}, whose content is unknown")
    return table


def _of_function(function: FunctionType, of: Any) -> str:
    code = function.__code__
    # The first line tells apart functions with one name, as lambdas have.
    name = f"{function.__module__}.{function.__qualname__}:{code.co_firstlineno}"
    rest = (function.__closure__, function.__defaults__, function.__kwdefaults__)
    return name if not any(rest) else f"{name}{of(tuple(each or () for each in rest))}"


def _other(value: object) -> str:
    raise Unshareable(f"it reads a {type(value).__qualname__} that is no module of the model")


_SHOWN = 200  # characters of a content in the log
_OF_THE_STATE = (TensorPredicate, Conditions, HasAttributes)


class GuardEncoder:
    """Encodes a model's guards, and the defaults on functions that it calls."""

    def __init__(self, model: nn.Module, captured: Captured) -> None:
        self.guards, self.functions = captured.reads.guards, captured.functions
        self.names, self.parameters = module_names(model), parameter_names(model)
        self.values: dict[int, Source] = {}  # sources of objects, by id
        for guard in self.guards:
            self.values.setdefault(id(guard.source.read()), guard.source)

    def encode(self) -> list[Any]:
        """Return a row for every guard and function: its source, its form, the content there.

        Raises:
            Unshareable: A source has no name, or its content no text.
        """
        # Installed packages are compared by version (files.py): their defaults are known.
        named = [f for f in self.functions if _defaults(f) and not is_installed(f.__module__)]
        return [*map(self._row, self.guards), *map(self._function_row, named)]

    def _function_row(self, function: FunctionType) -> list[Any]:
        module, name = function.__module__, function.__qualname__
        if _function(module, name) is not function:
            raise Unshareable(f"{name} has defaults, and no name that leads to it")
        text = content(_defaults(function), self.names)
        return [[["function", module, name], []], "defaults", text]

    def _row(self, guard: Guard) -> list[Any]:
        if self._holds_parameters(guard):
            text = content_of(guard.source.read(), False, self.names | self.parameters)
            return [self._source(guard.source, frozenset()), "parameters", text]
        of_state = [*leaves_of(guard.predicate)] if isinstance(guard.predicate, Contents) else []
        if any(x is ANY or isinstance(x, _OF_THE_STATE) for x in (guard.predicate, *of_state)):
            raise Unshareable(f"it takes {guard.source} as an argument")
        value = guard.source.read()
        has_attributes = isinstance(guard.predicate, Contents) and not isinstance(
            value, (dict, tuple, *LISTS)
        )
        return [
            self._source(guard.source, frozenset()),
            "attributes" if has_attributes else "value",
            self._content(value, has_attributes),
        ]

    def _holds_parameters(self, guard: Guard) -> bool:
        """Return whether a guard compares all but tensors, and these are the model's parameters.

        Of these it may compare the identity: the text has their names.
        The program has parameters as inputs, as those of an LSTM, which are in a list, too.
        """
        if not isinstance(guard.predicate, Contents):
            return False
        predicates = [*leaves_of(guard.predicate)]
        values = [*leaves_of(snapshot(guard.source.read()))]
        tensors = [x for x in values if isinstance(x, Tensor)]
        return (
            bool(tensors)
            and len(values) == len(predicates)
            and all(
                (p is ANY or p is x) if isinstance(x, Tensor) else p is not ANY
                for p, x in zip(predicates, values)
            )
            and all(id(x) in self.parameters for x in tensors)
        )

    def _content(self, value: object, has_attributes: bool) -> str:
        return content_of(value, has_attributes, self.names)

    def _source(self, source: Source, around: frozenset[int]) -> list[Any]:
        steps = []
        for step in source.steps:
            if not isinstance(step, Attribute) and type(step) not in (str, int):
                raise Unshareable(f"it reads {source}, whose key is an object")
            steps.append(f".{step.name}" if isinstance(step, Attribute) else [step])
        return [self._root(source.root, around), steps]

    def _root(self, root: object, around: frozenset[int]) -> list[Any]:
        """Return the path on which another process finds the root."""
        if id(root) in self.names:
            return ["module", self.names[id(root)]]
        if isinstance(root, dict) and (module := sys.modules.get(str(root.get("__name__")))):
            if module.__dict__ is root:
                return ["globals", module.__name__]
        if isinstance(root, type) and _class(root.__module__, root.__qualname__) is root:
            return ["class", root.__module__, root.__qualname__]
        # `around` has the roots under way: two that name each other would never end.
        if (source := self.values.get(id(root))) is not None and id(root) not in around:
            return ["value", self._source(source, around | {id(root)})]
        raise Unshareable(f"it reads an attribute of a {type(root).__qualname__} without a name")


def encode_run_guards(captured: Captured) -> dict[str, Any] | None:
    """Return the state with which a run is compared, besides its argument values.

    Raises:
        Unshareable: A value that forward reads has no text.
    """
    if (guards := captured.run_guards) is None:
        return None
    facts, reads = guards.module, []
    if facts is not None:
        reads = GuardEncoder(facts.module, captured).encode()
    return {
        "names": list(guards.arguments.names),
        "module": None if facts is None else facts.described(),
        "methods": guards.functions.methods.described(),
        "reads": reads,
    }


def place_run_guards(rows: dict[str, Any], captured: Captured, model: nn.Module | None) -> None:
    """Put a run's guards on a program from a file, and on its model.

    Raises:
        Stale: The model, or a value that its forward reads, has changed since it was planned.
        Malformed: The rows have another type.
    """
    names = typed(rows, "names", list, "a name for each argument")
    if len(names) != len(captured.leaves) or not all(type(name) is str for name in names):
        raise Malformed(rows, "names", "a name for each argument")
    facts, functions = None, FunctionFacts(None)
    if model is not None and rows["module"] is not None:
        facts, functions = ModuleFacts(model), FunctionFacts(Reach(model))
        check_rows(facts.described(), rows, "module")
        check_rows(functions.methods.described(), rows, "methods")
        captured.reads = GuardDecoder(model).decode(typed(rows, "reads", list, "rows of guards"))
    arguments = ArgumentKeys.of_file(names, captured.leaves)
    captured.run_guards = RunGuards(arguments, facts, functions)


def check_rows(now: list[list[str]], rows: dict[str, Any], part: str) -> None:
    """Raise Stale unless a part's rows are those of the model.

    Raises:
        Malformed: They have another type.
    """
    then = typed(rows, part, list, "pairs of a name and a value")
    for (name, value), row in zip(now, then):
        if [name, value] != row:
            raise Stale(f"{name} is {value}, and was another when it was planned")
    # After the loop, which names the first difference where there is one.
    if len(now) != len(then):
        raise Stale("the model has other modules or methods than when it was planned")


class GuardDecoder:
    """Puts a text's guards on this process's model."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.names, self.parameters = module_names(model), parameter_names(model)

    def decode(self, rows: list[Any]) -> Guards:
        """Decode the guards.

        Raises:
            Stale: A source has another content here.
        """
        return Guards(self._guards(rows))

    def _guards(self, rows: list[Any]) -> Iterator[Guard]:
        for row, form, text in rows:
            source = self._source(row)
            value = source.read()
            if form == "defaults":
                value = _defaults(value)
            # By content, as another process has no such object; the new guard is on this one's.
            names = self.names | (self.parameters if form == "parameters" else {})
            try:
                here = content_of(value, form == "attributes", names)
            except Unshareable as error:  # it had a text, so it is another value
                raise Stale(f"{source} was {text[:_SHOWN]}; {error}") from None
            if here != text:
                raise Stale(f"{source} is {here[:_SHOWN]}, and was {text[:_SHOWN]}")
            if form == "defaults":
                continue
            then = (snapshot_components if form == "attributes" else snapshot)(value)
            yield Guard(source, then)

    def _source(self, row: list[Any]) -> Source:
        root, steps = row
        return Source(
            self._root(*root),
            tuple(Attribute(s[1:]) if isinstance(s, str) else s[0] for s in steps),
        )

    def _root(self, kind: str, *name: Any) -> Any:
        if kind == "module":
            root = self.modules.get(name[0])
        elif kind == "globals":
            root = getattr(sys.modules.get(name[0]), "__dict__", None)
        elif kind == "class":
            root = _class(*name)
        elif kind == "function":
            root = _function(*name)
        else:
            root = self._source(name[0]).read()
        if root is None or root is ABSENT:
            raise Stale(f"there is no {kind} {name[0]}")
        return root


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Map parameter ids to their names in the model."""
    return {id(p): name for name, p in model.named_parameters()}


def module_names(model: nn.Module) -> dict[int, str]:
    """Map module ids to their names in the model."""
    return {id(module): name for name, module in model.named_modules()}


def content_of(value: object, has_attributes: bool, names: dict[int, str]) -> str:
    if has_attributes:
        value = {str(k): v for k, v in zip(*_keys_and_items(snapshot_components(value)))}
    return content(value, names)


def _keys_and_items(contents: Contents) -> tuple[tuple, tuple]:
    return contents.keys, contents.items


def _class(module: str, name: str) -> object:
    found = _named(module, name)
    return found if isinstance(found, type) else None


def _function(module: str, name: str) -> Any:
    found = function_in(_named(module, name))
    return found if isinstance(found, FunctionType) else None


def _named(module: str, name: str) -> Any:
    # Never an import: a text must not make a process run code.
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found


def _defaults(function: FunctionType) -> tuple:
    table = function.__kwdefaults__
    return (function.__defaults__, table) if function.__defaults__ or table else ()
