"""Docstrings of the public interface: their sections, and their examples, which run.

An example sees torch and the public names of torchgspmd; it needs no devices.
"""

import ast
import doctest
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchgspmd

GLOBALS = {
    "torch": torch,
    "gspmd": torchgspmd,
    **{name: getattr(torchgspmd, name) for name in torchgspmd.NAMES},
}
NAMES = [name for name in torchgspmd.NAMES if name != "UNCONSTRAINED"]


def public() -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of public names, those of namespaces too."""
    for name in NAMES:
        value = getattr(torchgspmd, name)
        if inspect.ismodule(value):
            yield from ((f"{name}.{each.__name__}", each) for each in value.PUBLIC)
        else:
            yield name, value


def functions() -> Iterator[tuple[str, Callable]]:
    """Yield (name, function) of public functions, and of public methods of public classes."""
    for name, value in public():
        if not inspect.isclass(value):
            yield name, value
            continue
        for method, item in vars(value).items():
            function = getattr(item, "__func__", item)  # classmethod
            if not method.startswith("_") and inspect.isfunction(function):
                yield f"{name}.{method}", function


FUNCTIONS = dict(functions())
CLASSES = {name: value for name, value in public() if inspect.isclass(value)}


def sections(value: Any) -> set[str]:
    lines = (inspect.getdoc(value) or "").splitlines()
    return {line[:-1] for line in lines if line in ("Args:", "Returns:", "Raises:", "Example:")}


def raises(function: Callable) -> bool:
    """True if the source of a function has a `raise` or a check that raises."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    checks = ("check", "check_axis", "check_mark", "compile_plan", "spread_inputs")
    return any(
        isinstance(node, ast.Raise)
        or isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", None)) in checks
        for node in ast.walk(tree)
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_has_all_sections(name):
    function = FUNCTIONS[name]
    signature = inspect.signature(function, eval_str=False)
    arguments = [p for p in signature.parameters if p not in ("self", "cls") and p[0] != "_"]
    required = {"Example"}
    required |= {"Args"} if arguments else set()
    required |= {"Returns"} if signature.return_annotation != "None" else set()
    required |= {"Raises"} if raises(function) else set()
    assert required - sections(function) == set()
    doc = inspect.getdoc(function)
    assert [a for a in arguments if f"    {a}: " not in doc] == []


@pytest.mark.parametrize("name", CLASSES)
def test_class_has_arguments_and_an_example(name):
    assert {"Args", "Example"} - sections(CLASSES[name]) == set()


@pytest.mark.parametrize("name", CLASSES)
def test_every_property_has_a_docstring(name):
    properties = {
        key: item
        for key, item in vars(CLASSES[name]).items()
        if not key.startswith("_") and hasattr(item, "__get__") and not inspect.isroutine(item)
    }
    assert [key for key, item in properties.items() if not inspect.getdoc(item)] == []


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES])
def test_first_line_is_a_sentence(name):
    doc = inspect.getdoc((FUNCTIONS | CLASSES)[name])
    first, *rest = doc.splitlines()
    assert first.endswith(".") and (not rest or not rest[0])


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES])
def test_example_runs(name):
    value = (FUNCTIONS | CLASSES)[name]
    test = doctest.DocTestParser().get_doctest(
        inspect.getdoc(value), dict(GLOBALS), name, None, None
    )
    assert test.examples
    failures: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE).run(
        test, out=failures.append
    )
    assert not failures, "".join(failures)
