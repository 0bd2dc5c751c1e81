"""in_specs and out_specs: pytree prefixes with layouts, spread over a structure's tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError
from .mesh import Mesh
from .spec import ShardSpec
from .spec_notation import AUTO, SAME, UNCONSTRAINED, check_no_placement, text_of_entries

# Names of axes that divide the batch, in the libraries of the field.
BATCH_AXES = ("data", "batch", "dp", "fsdp", "replica", "dp_replicate", "dp_shard", "replicate")


def is_same(prefix: object) -> bool:
    """Return whether a prefix leaves all layouts below it as they are computed."""
    return prefix is UNCONSTRAINED or isinstance(prefix, str) and prefix == SAME


def spread(prefix: object, tree: object, mesh: Mesh, what: str) -> list[ShardSpec | None]:
    """Return a spec, or None, for every tensor leaf of `tree`.

    A prefix leaf is a string, a ShardSpec, None, SAME or UNCONSTRAINED; it applies to every tensor
    below it. The prefix must have the tree's containers.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    # Before the case of strings: "same" is a string, but no spec.
    if is_same(prefix):
        return [ShardSpec.unconstrained(leaf.dim()) for leaf in leaves]
    if prefix is None:
        return [None] * len(leaves)
    if isinstance(prefix, (str, ShardSpec)):
        parsed = ShardSpec.parse(prefix)
        if parsed.pending:
            raise ShardingError.here(f"spec '{parsed}' for {what} asks for a pending reduction")
        return [parsed.check(mesh, leaf.shape, what) for leaf in leaves]
    if isinstance(prefix, Mapping) and isinstance(tree, Mapping):
        unknown = [key for key in prefix if key not in tree]
        if unknown:
            raise ShardingError.here(
                f"{what} has no entry {unknown[0]!r}; it has {', '.join(map(repr, tree))}"
            )
        return [
            spec
            # In the order of the tree, whose leaves pair up with specs by position.
            for key in tree
            for spec in spread(prefix.get(key), tree[key], mesh, f"{what}[{key!r}]")
        ]
    if isinstance(prefix, Sequence) and isinstance(tree, Sequence):
        if len(prefix) != len(tree):
            one = len(tree) == 1 and text_of_entries(prefix)
            raise ShardingError.here(
                f"{what} has {len(tree)} entries, but {len(prefix)} specs are given",
                fix=f"a tuple has one spec an argument; write in_specs='{one}' for one argument"
                if one
                else "give one spec for each, None where it is open; a spec itself is a string "
                "here, a tuple is a container",
            )
        return [
            spec
            for i, (p, t) in enumerate(zip(prefix, tree))
            for spec in spread(p, t, mesh, f"{what}[{i}]")
        ]
    raise ShardingError.here(
        f"the specs given for {what} are a {type(prefix).__name__}, "
        f"where the value is a {type(tree).__name__}",
        fix="write specs as strings, in the containers of the value",
    )


def _parameters(fn: Callable) -> list[inspect.Parameter]:
    fn = fn.forward if isinstance(fn, nn.Module) else fn
    try:
        return list(inspect.signature(fn).parameters.values())
    # Functions written in C may have no signature that Python can read.
    except (TypeError, ValueError):
        return []


def argument_names(fn: Callable, args: tuple) -> list[str]:
    """Return the names of positional arguments in fn's signature; arg3 where it has none."""
    positional = [
        p.name for p in _parameters(fn) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return positional[: len(args)] + [f"arg{i}" for i in range(len(positional), len(args))]


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes whose names say that they divide the batch."""
    axes = tuple(name for name in mesh.names if name in BATCH_AXES)
    if not axes:
        raise ShardingError.here(
            f"in_specs='{AUTO}' finds no axis of the batch in {mesh}",
            fix=f"call one {' or '.join(map(repr, BATCH_AXES[:3]))}, "
            f"or name it: in_specs='{mesh.names[0]} _'",
        )
    return axes


def spread_inputs(
    prefix: object, args: tuple, kwargs: dict, mesh: Mesh, fn: Callable
) -> list[ShardSpec | None]:
    """Return a spec, or None, for every tensor in (args, kwargs).

    A tuple or list is a prefix for args, a mapping one for all arguments by name. A single spec
    needs a single argument. AUTO divides each tensor's leading dimension by the batch axes. fn: the
    called function, for its argument names. A call may leave out arguments that have a default, as
    labels in an evaluation; their specs wait for a call that has them.
    """
    for entry in pytree.tree_leaves(prefix):
        check_no_placement(entry, prefix, mesh.names)
    # Scalars have no dimension to divide, and stay open.
    if isinstance(prefix, str) and prefix == AUTO:
        axes = batch_axes(mesh)
        leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        return [ShardSpec((axes, *((),) * (t.dim() - 1))) if t.dim() else None for t in leaves]
    if isinstance(prefix, Mapping):
        given = {**dict(zip(argument_names(fn, args), args)), **kwargs}
        optional = {p.name for p in _parameters(fn) if p.default is not p.empty}
        prefix = {n: spec for n, spec in prefix.items() if n in given or n not in optional}
        return spread(prefix, given, mesh, "arguments")
    if isinstance(prefix, (tuple, list)) and not kwargs:
        left_out = _parameters(fn)[len(args) : len(prefix)]
        if len(args) + len(left_out) == len(prefix) and all(
            p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty for p in left_out
        ):
            prefix = prefix[: len(args)]
    if isinstance(prefix, (str, ShardSpec)) and len(args) == 1:
        prefix = (prefix,)
    elif isinstance(prefix, (str, ShardSpec)):
        raise ShardingError.here(
            f"one spec, '{prefix}', is given for {len(args)} arguments",
            fix="give a tuple with one spec for each",
        )
    elif isinstance(prefix, (tuple, list)) and len(prefix) > len(args) and kwargs:
        names = ", ".join(f"'{name}': ..." for name in (*argument_names(fn, args), *kwargs))
        raise ShardingError.here(
            f"{len(prefix)} specs are given for {len(args)} positional arguments; "
            f"{', '.join(map(repr, kwargs))} passed by keyword",
            fix=f"name them all: in_specs={{{names}}}",
        )
    # A list is the user's container here; args are a tuple, whose type the prefix has to have.
    return spread(
        tuple(prefix) if isinstance(prefix, list) else prefix, args, mesh, "args"
    ) + spread(None, kwargs, mesh, "kwargs")
