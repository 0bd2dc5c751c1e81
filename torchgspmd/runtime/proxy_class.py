"""A model proxy's class: a subclass of the model's class, with the model's attributes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache, wraps
from inspect import signature
from types import FunctionType, MethodType
from typing import Any

from torch import nn


class _Delegate:
    """A proxy's attribute that is the model's own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, proxy: object, owner: type) -> Any:
        if proxy is None:
            return getattr(owner._of, self.name)
        own = proxy.__dict__
        return own[self.name] if self.name in own else of_model(proxy, self.name)

    def __set__(self, proxy: Any, value: Any) -> None:
        setattr(proxy._model, self.name, value)

    def __delete__(self, proxy: Any) -> None:
        delattr(proxy._model, self.name)


def of_model(proxy: object, name: str) -> Any:
    """Return one of the model's attributes. A method that returns the model returns the proxy."""
    model = proxy.__dict__["_model"]
    attribute = getattr(model, name)
    if not isinstance(attribute, MethodType) or attribute.__self__ is not model:
        return attribute

    @wraps(attribute.__func__)
    def method(self: object, *args: object, **kwargs: object) -> Any:
        result = attribute(*args, **kwargs)
        return self if result is model else result

    return MethodType(method, proxy)


# What a proxy does not take from the model: calls, their hooks, and the name.
_CALLS = re.compile(r"forward|.*_forward.*|.*backward.*|_\w*call_impl|modules|_get_name")
_MODULE = vars(nn.Module()).keys() | vars(nn.Module).keys()
# to, double and the like call _apply, which a proxy has.
OWN = frozenset(
    name
    for name in _MODULE
    if _CALLS.fullmatch(name)
    or "_apply" in getattr(getattr(vars(nn.Module).get(name), "__code__", None), "co_names", ())
)
# Special methods of a model's class that are not its proxy's.
_OWN_SPECIAL_METHODS = frozenset(
    "__init__ __new__ __call__ __repr__ __dir__ __hash__ __eq__ __getattribute__ __getattr__"
    " __setattr__ __delattr__ __getstate__ __setstate__ __reduce__ __reduce_ex__ __init_subclass__"
    " __class_getitem__".split()
)


def _delegates(proxy: type, model: type) -> Iterator[str]:
    """Yield the names that a proxy takes from its model, instead of its own class."""
    classes = proxy.__mro__[: proxy.__mro__.index(nn.Module)]
    own = {name for cls in classes for name in vars(cls)}
    names = {*vars(nn.Module()), *dir(model)} - own
    special = {
        name
        for cls in model.__mro__[: model.__mro__.index(nn.Module)]
        for name, value in vars(cls).items()
        if callable(value) and name not in _OWN_SPECIAL_METHODS
    }
    for name in names:
        if name in special if name.startswith("__") else name not in OWN:
            yield name


def _with_signature(function: Callable, like: Callable) -> Callable:
    """Copy a function; the copy shows another's signature; inspect.signature reads it."""
    copied = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__dict__.update(function.__dict__, __signature__=signature(like))
    return copied


@cache
def class_for(proxy: type, model: type) -> type:
    """Return a model proxy's class: a subclass of the model's, with the model's methods."""
    namespace: dict[str, Any] = {name: _Delegate(name) for name in _delegates(proxy, model)}
    namespace |= {"_of": model, "__module__": proxy.__module__, "__doc__": proxy.__doc__}
    namespace["forward"] = _with_signature(proxy.forward, model.forward)
    try:
        return type(model)(f"{proxy.__name__}[{model.__name__}]", (proxy, model), namespace)
    except TypeError:  # The model's class allows no subclass of this kind.
        return type(proxy)(proxy.__name__, (proxy,), namespace)
