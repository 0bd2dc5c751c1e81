"""One object for equal content."""

from __future__ import annotations

from typing import Any


class Interned(type):
    """Metaclass that returns one object for equal fields.

    Instances are then compared and hashed by identity, which planning does millions of times.
    """

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        instance: Any = None if kwargs else _INTERNED.get(args)
        if instance is None:
            instance = super().__call__(*args, **kwargs)
            # setdefault: another thread may have made the same instance; all get the first one.
            instance = _INTERNED.setdefault(instance.fields(), instance)
            if not kwargs:
                _INTERNED[args] = instance
        return instance


# By all fields, and by the arguments of former calls, which may leave out the last ones.
_INTERNED: dict[tuple[Any, ...], Any] = {}
