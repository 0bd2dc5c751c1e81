"""A model's layers in a search: like ones, recomputed ones, and stacks of experts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from ...capture import PARAMETER, Captured, Input
from ...compat.private_apis import _pytree as pytree
from ...fx_passes.ir import Rules
from ...layout.mark import mark_sharding_op
from ...layout.mesh import Mesh
from ...shard_spec import ShardSpec

MIN_LAYERS = 4  # a shorter list is not cut
LISTS = (nn.ModuleList, nn.Sequential)

Recomputed = tuple[tuple[str, int], ...]  # see Savings


@dataclass(frozen=True)
class Layers:
    """A model's lists of layers, by path, none inside another one.

    alike: all layers in a list are alike, and the lists have one length: two layers stand for all.
    length: the lists' length; if not alike, the length of all lists together.
    """

    lists: Mapping[str, nn.Module]
    alike: bool

    @classmethod
    def of(cls, model: nn.Module) -> Layers:
        """Return a model's longest lists of like layers, else all its lists."""
        lists = dict(_outermost(model))
        like = {path: layers for path, layers in lists.items() if _are_alike(layers)}
        length = max((len(_children(layers)) for layers in like.values()), default=0)
        longest = {path: each for path, each in like.items() if len(_children(each)) == length}
        return cls(longest, True) if longest else cls(lists, False)

    @property
    def length(self) -> int:
        sizes = [len(_children(layers)) for layers in self.lists.values()]
        return max(sizes, default=0) if self.alike else sum(sizes)

    def without(self, names: list[str]) -> Layers:
        kept = {
            path: layers
            for path, layers in self.lists.items()
            if not any(name.startswith(f"{path}." if path else "") for name in names)
        }
        return Layers(kept, self.alike)

    def slices(self, recomputed: Recomputed) -> Iterator[tuple[str, str, int, int]]:
        """Yield list, submodule, first and end for the layers that are recomputed."""
        first = 0
        for submodule, number in recomputed:
            before = 0
            for path, layers in self.lists.items():
                size = len(_children(layers))
                low, high = (max(n - before, 0) for n in (first, first + number))
                if min(high, size) > low:
                    yield path, submodule, low, min(high, size)
                # Like lists are cut at the same layer; others count one after the other.
                before += 0 if self.alike else size
            first += number

    def code(self, recomputed: Recomputed) -> str:
        """Return code for layers, such as model.layers[:8]."""
        parts = []
        for path, submodule, low, high in self.slices(recomputed):
            size = len(_children(self.lists[path]))
            ends = f"{low or ''}:{high if high < size else ''}"
            part = _code(path) + (f"[{ends}]" if ends != ":" else "")
            name = _code(submodule, "each")
            parts.append(f"({name} for each in {part})" if submodule else part)
        return parts[0] if len(parts) == 1 else f"[{', '.join(f'*{part}' for part in parts)}]"

    def submodules(self) -> list[str]:
        layers = next(iter(self.lists.values()), None)
        if layers is None or not self.alike:
            return []
        children = _children(layers)[0].named_children()
        return [name for name, child in children if not isinstance(child, nn.ModuleList)]

    def globs(self) -> list[str]:
        return [f"{path}.*" if path else "*" for path in self.lists]

    def named_parts(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield like layers and their parts, each with the glob that matches its like."""
        for glob, layers in zip(self.globs(), self.lists.values()) if self.alike else ():
            for layer in _children(layers):
                yield glob, layer
                yield from ((f"{glob}.{name}", part) for name, part in layer.named_children())

    @contextmanager
    def shortened(self, count: int) -> Generator[None]:
        saved = [(layers, layers._modules) for layers in self.lists.values()]
        for layers, modules in saved:
            layers._modules = OrderedDict(list(modules.items())[:count])
        try:
            yield
        finally:
            for layers, modules in saved:
                layers._modules = modules

    @contextmanager
    def recomputed(self, recomputed: Recomputed) -> Generator[None]:
        """Have the backward compute layers, or their submodules, again in the block."""
        chosen = [
            layer.get_submodule(submodule)
            for path, submodule, low, high in self.slices(recomputed)
            for layer in _children(self.lists[path])[low:high]
        ]
        saved: list[tuple[dict[str, object], object]] = []
        # One module may be in several places: it is wrapped once.
        for layer in dict.fromkeys(chosen):
            saved.append((vars(layer), vars(layer).get("forward")))
            # As the proposal's code does it (RECOMPUTE), so that both have one cost.
            vars(layer)["forward"] = partial(checkpoint, layer.forward, use_reentrant=False)
        try:
            yield
        finally:
            for attributes, forward in saved:
                attributes.pop("forward")
                if forward is not None:
                    attributes["forward"] = forward


def _outermost(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the lists that are in no other list."""
    inner: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, LISTS) and len(module) and id(module) not in inner:
            # A list inside a list is a part of its layers.
            inner.update(id(each) for each in module.modules())
            yield path, module


def _are_alike(layers: nn.Module) -> bool:
    # Values are not compared, since planning reads none.
    kinds = [
        (type(layer), *((name, tuple(p.shape)) for name, p in layer.named_parameters()))
        for layer in _children(layers)
    ]
    return len(kinds) >= MIN_LAYERS and len({*kinds}) == 1


def _children(layers: nn.Module) -> list[nn.Module]:
    return [module for module in layers._modules.values() if module is not None]


def _code(path: str, owner: str = "model") -> str:
    parts = path.split(".") if path else []
    return owner + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in parts)


# Marks on layer outputs in a search: one capture notes all outputs, each plan marks some.


MARK = mark_sharding_op._opoverload


@contextmanager
def noted(layers: Layers) -> Generator[None]:
    """Capture a mark behind each output in the block: with a glob in place of a mesh."""
    handles = [module.register_forward_hook(_note(glob)) for glob, module in layers.named_parts()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note(glob: str) -> Callable[[nn.Module, object, object], object]:
    """Return a forward hook that marks as annotate would, if all of it has one shape."""

    def hook(module: nn.Module, args: object, output: object) -> object:
        floats = [x for x in pytree.tree_leaves(output) if _is_float(x)]
        sizes = [n for x in floats for n in x.shape]
        if not all(isinstance(n, int) for n in sizes):  # one that only a run knows
            return output
        shapes = {tuple(x.shape) for x in floats}
        if len(shapes) != 1 or len(floats[0].shape) < 2:
            return output
        spec = " ".join("?" * len(floats[0].shape))
        return pytree.tree_map(
            lambda x: mark_sharding_op(x, glob, spec) if _is_float(x) else x, output
        )

    return hook


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def output_groups(
    captured: Captured, layers: Layers
) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Return (shape, globs) for the layers' outputs, and for these and their parts' of that shape.

    captured: with `noted`.
    """
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for node in captured.graph.find_nodes(op="call_function", target=MARK):
        shapes.setdefault(node.args[1], set()).add(tuple(node.meta["val"].shape))
    single = {glob: next(iter(each)) for glob, each in shapes.items() if len(each) == 1}
    outer = [glob for glob in layers.globs() if glob in single]
    if not outer:
        return []
    shape = single[outer[0]]
    every = tuple(glob for glob in single if single[glob] == shape)
    whole = tuple(glob for glob in outer if glob in every)
    return [(shape, globs) for globs in dict.fromkeys([whole, every])]


def with_marks(
    captured: Captured, mesh: Mesh, spec_of: Callable[[str, Sequence[int]], ShardSpec | None]
) -> Captured:
    """Return a program that was captured with `noted`, with marks on some outputs.

    spec_of: an output's layout, from its glob and shape; None for no mark.
    """
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in captured.graph.nodes:
        if node.target is not MARK:
            new[node] = graph.node_copy(node, new.__getitem__)
            continue
        value, glob, _ = node.args
        spec = spec_of(glob, node.meta["val"].shape)
        new[node] = new[value]
        if spec is not None:
            new[node] = graph.node_copy(node, new.__getitem__)
            new[node].args = (new[value], str(mesh), str(spec))
    return replace(captured, graph=graph)


# Stacks of matrices, one for each expert, among a program's parameters.


def expert_stacks(captured: Captured) -> list[Input]:
    """Return the parameters [experts, k, n] whose matrices are multiplied each by its own rows.

    A product may also add up the experts' results. So a parameter as long as a stack, in the same
    module, is one too.
    """
    rules, placeholders = Rules(), captured.graph.find_nodes(op="placeholder")
    pairs = [
        (node, inp)
        for node, inp in zip(placeholders, captured.inputs)
        if inp.kind == PARAMETER and len(inp.shape) == 3
    ]
    places = {_place(inp) for node, inp in pairs if _is_stack(node, 0, rules)}
    return [inp for _, inp in pairs if _place(inp) in places]


def _place(inp: Input) -> tuple[str, int]:
    return inp.name.rpartition(".")[0], inp.shape[0]


def _is_stack(value: fx.Node, dim: int, rules: Rules) -> bool:
    """Return whether the first product of a value multiplies each part of a dimension by itself."""
    for user in value.users:
        if user.op != "call_function":
            continue
        op = rules.op(user)
        at = op.operands.index(value) if value in op.operands else None
        factors = {*op.rule.operands[at][dim]} if at is not None and op.rule.described else set()
        found = [
            (result, d)
            for result, dims in zip(op.results, op.rule.results)
            for d, names in enumerate(dims)
            if result is not None and not factors.isdisjoint(names)
        ]
        if op.rule.contraction:
            # Rows choose its matrices, or the other operand and the result have the dimension too.
            others = [{f for names in dims for f in names} for dims in op.rule.operands]
            if factors & op.rule.chosen or found and factors & set.intersection(*others):
                return True
        elif len(op.operands) == 1 and any(_is_stack(*place, rules) for place in found):
            return True
    return False
