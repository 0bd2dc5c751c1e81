"""Layout: a table from logical dimension names to mesh axes.

    tp = Layout({"batch": "data", "heads": "model", "embed": None}).on(mesh)
    mark_sharding(q, "batch _ heads _")                 # in the model, which has no mesh
    plan(model, x, mesh=tp)                             # on data=2,model=4: "data _ model _"

A model names its dimensions; the table alone says how they lie on a mesh. The idea is
Mesh-TensorFlow's, its layout rules (arXiv 1811.02084).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from ..compat.patches import setting
from ..errors import ShardingError, did_you_mean
from .mesh import Mesh
from .spec_notation import AUTO, SAME, split_priority

Axes = tuple[str, ...]
Rule = str | Sequence[str] | None


class Choice(NamedTuple):
    """One alternative in a rule: axes, and the round in which marks propagate them."""

    axes: Axes
    priority: int = 0

    def __str__(self) -> str:
        return ("+".join(self.axes) or "_") + f":p{self.priority}" * (self.priority > 0)


class Layout:
    """A table of rules: logical name -> axes.

    Args:
        rules: Each value is an axis ("model"), axes joined by "+" (major first), None (whole on
            every device), or a sequence of such. The first possible one in a sequence is taken. A
            name that comes before others takes its axes before them. "data:p1" has priority 1:
            it yields to axes with priority 0, in a tensor that has both names and, where layouts
            meet, in every operation.

    Raises:
        ShardingError: A name or an axis is no identifier.

    Example:
        >>> from torchgspmd import Layout, Mesh
        >>> tp = Layout({"batch": "data", "heads": "model", "embed": None})
        >>> print((tp | Layout({"embed": "data"})).on(Mesh(data=2, model=4)))
        batch  data
        heads  model
        embed  data
    """

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self.rules: dict[str, tuple[Choice, ...]] = {
            _name(name): tuple(
                map(_choice, (rule,) if rule is None or isinstance(rule, str) else rule)
            )
            for name, rule in rules.items()
        }

    def __or__(self, other: Layout) -> Layout:
        """Return both tables' rules; `other` wins for a common name, as with dicts."""
        combined = Layout({})
        combined.rules = self.rules | other.rules
        return combined

    def __eq__(self, other: object) -> bool:
        # Order counts, unlike in dicts: an earlier name takes its axes first.
        return isinstance(other, Layout) and [*self.rules.items()] == [*other.rules.items()]

    def __hash__(self) -> int:
        return hash(tuple(self.rules.items()))

    def __str__(self) -> str:
        return _table((n, " or ".join(map(str, choices))) for n, choices in self.rules.items())

    def __repr__(self) -> str:
        return f"Layout({ {n: [*map(str, choices)] for n, choices in self.rules.items()} })"

    def on(self, mesh: Mesh) -> MeshLayout:
        """Return the table for a mesh, which marks take in place of the mesh.

        A name whose axes the mesh lacks is not sharded, with a warning.

        Args:
            mesh: The devices.

        Returns:
            The `mesh` of `plan` and `parallelize` when marks and specs are logical names.

        Example:
            >>> from torchgspmd import Layout, Mesh
            >>> layout = Layout({"batch": "data", "heads": ("model", "data")})
            >>> layout.on(Mesh(data=2)).spec("heads _")
            'data _'
        """
        lost = [
            name
            for name, choices in self.rules.items()
            if any(c.axes for c in choices)
            and not any(c.axes and _has(mesh, c.axes) for c in choices)
        ]
        if lost:
            warnings.warn(
                f"{' and '.join(map(repr, lost))}: whole on every device, since mesh {mesh} has "
                "none of the axes that the layout names",
                stacklevel=2,
            )
        return MeshLayout(self, mesh)


@dataclass(frozen=True)
class MeshLayout:
    """A Layout on a mesh: translates logical names to axes.

    seen: the names that marks translated, tensor by tensor.
    """

    layout: Layout
    mesh: Mesh
    seen: set[str] = field(default_factory=set, compare=False, repr=False)

    def __str__(self) -> str:
        """Return the table, the tensors in which a name lost an axis, and axes without a rule."""
        rows = [(name, self.explain(name)) for name in self.layout.rules]
        # Alone each name gets its first choice that fits the mesh; together names compete for axes.
        alone = {name: self._choose(name)[name] for name in self.layout.rules}
        rows += [
            (f"[{names}]", self.explain(names))
            for names in sorted(self.seen)
            if any(choice != alone[name] for name, choice in self._choose(names).items())
        ]
        named = {a for rule in self.layout.rules.values() for choice in rule for a in choice.axes}
        rows += [("", f"no rule names axis '{a}'") for a in self.mesh.names if a not in named]
        return _table(rows)

    def spec(self, names: object) -> Any:
        """Return the spec for a tensor whose dimensions have these names.

        Args:
            names: One word a dimension: a logical name, `_`, `?`, or names joined by "+".
                Containers are translated leaf by leaf; values other than strings stay.

        Returns:
            The spec as a string.

        Raises:
            ShardingError: The table has no rule for a name.

        Example:
            >>> from torchgspmd import Layout, Mesh
            >>> layout = Layout({"heads": "model", "length": "model"}).on(Mesh(model=4))
            >>> layout.spec("length heads _"), layout.spec("length _")
            ('_ model _', 'model _')
        """
        if isinstance(names, Mapping):
            return {key: self.spec(value) for key, value in names.items()}
        if isinstance(names, (tuple, list)):
            return type(names)(map(self.spec, names))
        if not isinstance(names, str) or names in (AUTO, SAME):
            return names
        chosen = self._choose(names)
        # Only after _choose: names without a rule raise, and count as used by no mark.
        self.seen.add(names)
        return _spec(names, chosen)

    def has_axes(self, names: object) -> bool:
        """Return whether a text has axes of the mesh, and no name of the table."""
        words = _words(names) if isinstance(names, str) else [""]
        return all(word in self.mesh.names and word not in self.layout.rules for word in words)

    def explain(self, names: str) -> str:
        """Explain as text which axes each name gets in one tensor, and which rules are skipped.

        Args:
            names: As in `spec`.

        Returns:
            One line.

        Raises:
            ShardingError: The table has no rule for a name.

        Example:
            >>> from torchgspmd import Layout, Mesh
            >>> layout = Layout({"heads": "model", "length": "model"}).on(Mesh(model=4))
            >>> layout.explain("length heads _")
            "_ model _ ('length' not on model: taken by 'heads')"
        """
        chosen = self._choose(names)
        owners = {axis: name for name, choice in chosen.items() for axis in choice.axes}
        reasons = []
        for name in chosen:
            for choice in self.layout.rules[name]:
                # Later alternatives were never tried: only those before the choice have a reason.
                if choice == chosen[name]:
                    break
                lacks = [a for a in choice.axes if a not in self.mesh.names]
                takers = dict.fromkeys(
                    repr(owners[a]) for a in choice.axes if owners.get(a, name) != name
                )
                why = f"the mesh has no {'+'.join(lacks)}" if lacks else "taken by "
                why += "" if lacks else " and ".join(takers)
                reasons.append(f"'{name}' not on {'+'.join(choice.axes)}: {why}")
        return _spec(names, chosen) + (f" ({'; '.join(reasons)})" if reasons else "")

    def check_used(self) -> None:
        """Raise ShardingError if the table has rules for names that no mark has used.

        `plan` calls it, and so does the first call to a module from `parallelize`.

        Raises:
            ShardingError: Such a rule exists.

        Example:
            >>> from torchgspmd import Layout, Mesh
            >>> layout = Layout({"heads": "model"}).on(Mesh(model=4))
            >>> _ = layout.spec("heads _")
            >>> layout.check_used()
        """
        used = {name for names in self.seen for name in _words(names)}
        for name in self.layout.rules:
            if name not in used:
                raise ShardingError.here(
                    f"the layout has a rule for '{name}', which no mark uses",
                    fix=did_you_mean(name, sorted(used)),
                )

    def _choose(self, names: str) -> dict[str, Choice]:
        """Return each name's choice: by priority, then in table order."""
        words = _words(names)
        for name in words:
            if name not in self.layout.rules:
                raise ShardingError.here(
                    f"the layout has no rule for '{name}'",
                    fix=did_you_mean(name, self.layout.rules),
                )
        taken: set[str] = set()
        chosen = dict.fromkeys(words, Choice(()))
        rules = [(name, choices) for name, choices in self.layout.rules.items() if name in chosen]
        for name, choices in sorted(rules, key=lambda rule: rule[1][0].priority if rule[1] else 0):
            for choice in choices:
                if _has(self.mesh, choice.axes) and taken.isdisjoint(choice.axes):
                    chosen[name] = choice
                    taken.update(choice.axes)
                    break
        return chosen


# A ContextVar, as marks run deep inside forward, and threads may compile different programs.
_BOUND: ContextVar[MeshLayout | None] = ContextVar("layout", default=None)


@dataclass(frozen=True)
class Unmarked(MeshLayout):
    """Stands for a layout while a capture ignores all marks but those along an axis."""

    axis: str = ""

    def ignores(self, spec: object) -> bool:
        """Return whether a mark does not count. A pipeline's own specs are tuples."""
        return not (self.axis and isinstance(spec, tuple) and self.axis in spec)


def bound(layout: MeshLayout | None) -> AbstractContextManager[MeshLayout | None]:
    """While a program is compiled, translate marks without a mesh by a layout."""
    return setting(_BOUND, layout)


def bound_layout() -> MeshLayout | None:
    """Return the layout that translates marks at this moment."""
    return _BOUND.get()


def _words(names: str) -> list[str]:
    """List the logical names in a spec."""
    return [name for word in names.split() for name in word.split("+") if name not in ("_", "?")]


def _spec(names: str, chosen: Mapping[str, Choice]) -> str:
    """Return a spec, with each name's axes where the name stands first.

    A dimension with several names has the lowest of their priorities, which is the largest number.
    """
    # pop: an axis may shard one dimension alone, so a repeated name gets no axes.
    remaining, words = dict(chosen), []
    for word in names.split():
        parts = [remaining.pop(name, Choice(())) for name in word.split("+")]
        axes = tuple(axis for part in parts for axis in part.axes)
        words.append("?" if word == "?" else str(Choice(axes, max(p.priority for p in parts))))
    return " ".join(words)


def _has(mesh: Mesh, axes: Axes) -> bool:
    return all(axis in mesh.names for axis in axes)


def _name(name: object) -> str:
    """Check and return an identifier."""
    if not isinstance(name, str) or not name.isidentifier() or name == "_":
        raise ShardingError.here(
            f"{name!r} is no name of a dimension or an axis",
            fix='write a rule as "heads": "model", "model+data", "data:p1", None, or a sequence '
            "of these",
        )
    return name


def _choice(rule: object) -> Choice:
    """Parse one alternative."""
    if rule is None or rule == "_":
        return Choice(())
    if not isinstance(rule, str):
        return Choice((_name(rule),))
    axes, priority = split_priority(rule)
    return Choice(tuple(map(_name, axes.split("+"))), priority)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    """Format two columns as text."""
    lines = [*rows]
    width = max((len(name) for name, _ in lines), default=0)
    return "\n".join(f"{name:{width}}  {text}" for name, text in lines)


def mesh_of(mesh: Mesh | DeviceMesh | MeshLayout) -> Mesh:
    """Return a Mesh as it is, else the Mesh for a DeviceMesh or a Layout on a mesh.

    Raises ShardingError for anything else.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, MeshLayout):
        return mesh.mesh
    if isinstance(mesh, DeviceMesh):
        return Mesh.from_device_mesh(mesh)
    raise ShardingError.here(
        f"a mesh is a torchgspmd.Mesh or torch's DeviceMesh, not {type(mesh).__name__}",
        fix="pass a mesh such as Mesh(data=2, model=4)",
    )
