"""Find chains of operations between two exchanges that can be computed in parts.

    %r = all_to_all(%x, 1, 0, expert)          # [e, g, c, m]: rows of c stay on their device
    %h = einsum(egcm,emh->egch, %r, %up)       # so that each row of c is computed by itself
    %y = einsum(egch,ehm->egcm, %h, %down)
    %s = all_to_all(%y, 0, 1, expert)

The rules of a device's operations say which dimension they all have in common: nothing here knows
experts. Operands are traced back, through values without other uses, to the product that makes
them, so that the first part is sent while the second is computed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor, fx

from ...comm.kinds import all_gather, all_reduce, all_to_all, permute, reduce_scatter
from ...compat.fx_nodes import reached, written_operands
from ...compat.operators import aten, draws
from ...fx_passes.schedule.arithmetic import flops, meta_example
from ...rules import Call, FactorRule, LocalForm, Shapes, rule_of
from ...rules.notation import factors
from ...rules.registry import declares_order
from ...shard_spec import ShardSpec

EXCHANGES = all_to_all, permute
COLLECTIVES = (*EXCHANGES, all_gather, all_reduce, reduce_scatter)  # may be sent in parts


@dataclass
class Chain:
    """Operations that are computed in parts, with the factor of each one's rule that is cut.

    first, last: the exchanges. head: with operands of the first one; core: behind it.
    """

    first: fx.Node
    last: fx.Node
    head: dict[fx.Node, str] = field(default_factory=dict)
    core: dict[fx.Node, str] = field(default_factory=dict)

    @property
    def likeness(self) -> tuple[object, ...]:
        """Return a key that is equal for the chains of equal layers."""
        return tuple(
            (str(n.target), tuple(n.meta["shape"]), n.meta.get("backward"))
            for n in (*self.head, *self.core)
        )


class Chains:
    """The chains in a program of one device.

    cut: the dimension along which a value is computed in parts.
    """

    def __init__(self, graph: fx.Graph, left_out: Collection[object] = ()) -> None:
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        self.cut: dict[fx.Node, int] = {}
        self.rules: dict[fx.Node, FactorRule | None] = {}
        self.found: list[Chain] = []
        for node in graph.nodes:
            if node.target not in COLLECTIVES or node in self.cut or self.rule(node) is None:
                continue
            before = dict(self.cut)
            if (chain := next(self._chains(node), None)) is None:
                continue
            if chain.likeness in left_out:
                self.cut = before
            else:
                self.found.append(chain)

    def _chains(self, first: fx.Node) -> Iterator[Chain]:
        """Yield the chains behind a collective: to an exchange, or behind one to a collective."""
        behind = _behind(first)
        order = sorted(behind, key=self.place.__getitem__)
        lasts = [next((n for n in order if n.target in EXCHANGES), None)]
        if first.target in EXCHANGES:
            lasts.append(next((n for n in order if n.target in COLLECTIVES), None))
        for last in filter(None, dict.fromkeys(lasts)):
            for dim in range(len(first.meta["shape"])):
                if (chain := self._chain(first, last, dim, behind)) is not None:
                    yield chain

    def _chain(
        self, first: fx.Node, last: fx.Node, dim: int, behind: Collection[fx.Node]
    ) -> Chain | None:
        """Return the chain between two collectives, along a dimension; None if there is none."""
        needed = reached([last], lambda node: [x for x in node.all_input_nodes if x in behind])
        before, chain = dict(self.cut), Chain(first, last)
        whole = self._pull(first, dim, chain) and all(
            self._push(node, chain) for node in sorted(needed, key=self.place.__getitem__)
        )
        if whole and any(map(flops, chain.core)):
            return chain
        self.cut = before
        return None

    def rule(self, node: fx.Node) -> FactorRule | None:
        """Return the rule of an operation of one device; None if it is not computed in parts."""
        if node not in self.rules:
            self.rules[node] = _rule(node)
        return self.rules[node]

    def of_parts(self, node: fx.Node) -> FactorRule:
        """Return the rule of an operation that is computed in parts."""
        rule = self.rule(node)
        assert rule is not None, "it is computed in parts"
        return rule

    def factor(self, node: fx.Node) -> str | None:
        """Return the factor along which an operation's operands are cut; None for several."""
        rule = self.rule(node)
        if rule is None:
            return None
        dims = {
            rule.operands[i][self.cut[v]] for i, v in enumerate(tensors_in(node)) if v in self.cut
        }
        names = dims.pop() if len(dims) == 1 else ()
        return names[0] if len(names) == 1 and allows(rule, names[0]) else None

    def _push(self, node: fx.Node, chain: Chain) -> bool:
        """Compute an operation in parts, as its operands are; return whether that is possible."""
        factor, rule = self.factor(node), self.rule(node)
        if factor is None or rule is None or (factor,) not in rule.results[0]:
            return False
        dim = rule.results[0].index((factor,))
        if self.cut.setdefault(node, dim) != dim:  # an earlier chain reads other parts
            return False
        pulled = self._pull_operands(node, factor, chain)
        chain.core[node] = factor
        return pulled

    def _pull_operands(self, node: fx.Node, factor: str, chain: Chain) -> bool:
        for dims, value in zip(self.of_parts(node).operands, tensors_in(node)):
            if (factor,) in dims:
                dim = dims.index((factor,))
                if self.cut.get(value, dim) != dim:
                    return False
                one_use = len(value.users) == 1
                if value not in self.cut and one_use and _phase(value) == _phase(node):
                    self._pull(value, dim, chain)
        return True

    def _pull(self, node: fx.Node, dim: int, chain: Chain) -> bool:
        """Compute the operation that makes an operand in parts, too, if that is possible."""
        rule = self.rule(node)
        if rule is None or len(rule.results[0][dim]) != 1:
            return False
        (factor,) = rule.results[0][dim]
        if not allows(rule, factor):
            return False
        self.cut[node] = dim
        # Behind a product the operands are slices.
        if not flops(node) and not self._pull_operands(node, factor, chain):
            del self.cut[node]
            return False
        chain.head[node] = factor
        return True


def _phase(node: fx.Node) -> bool:
    return bool(node.meta.get("backward"))


def _behind(first: fx.Node) -> set[fx.Node]:
    """Return the nodes in the same phase that need a collective, up to the next exchanges."""

    def further(node: fx.Node) -> Iterator[fx.Node]:
        if node is first or node.target not in EXCHANGES:
            for user in node.users:
                if user.op == "call_function" and _phase(user) == _phase(first):
                    yield user

    return {*reached([first], further)} - {first}


def tensors_in(node: fx.Node) -> list[fx.Node]:
    """Return a node's tensor operands in order, with repetitions."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, dict(node.kwargs)), found.append)
    return [x for x in found if x.meta.get("dtype") is not None]


def allows(rule: FactorRule, factor: str) -> bool:
    """Return whether parts along a factor are the same operation, on slices."""
    local = rule.local
    is_emitted = local.emit is not None and (
        local.always or factor in local.when or factor in rule.windowed
    )
    needs = factor in rule.replicated or factor in rule.special or factor in rule.chosen
    alone = all(factor not in dim or len(dim) == 1 for t in rule.operands for dim in t)
    return alone and not needs and not is_emitted and rule.reduce.get(factor, "sum") == "sum"


def _rule(node: fx.Node) -> FactorRule | None:
    if node.op != "call_function" or node.meta.get("shape") is None or node.meta.get("unknown"):
        return None
    if node.target in COLLECTIVES:
        return _collective_rule(node)
    if draws_or_writes(node):  # a draw of a part has other numbers
        return None
    if "order" in node.meta or declares_order(node.target):
        return None
    if (along := _along(node)) is not None:
        return _rule_along(node, along)
    operands = tensors_in(node)
    if not operands or any(x.meta.get("unknown") for x in operands):
        return None
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), meta_example)
    values = [meta_example(x) for x in (*operands, node)]
    if not all(isinstance(value, Tensor) for value in values):  # such as the list of a split
        return None
    *tensors, result = cast(list[Tensor], values)
    call = Call(node.target, args, kwargs, tuple(tensors), (result,))
    rule = rule_of(call)
    return rule if rule.described and len(rule.results) == 1 else None


def _tensor(node: fx.Node) -> Tensor:
    return cast(Tensor, meta_example(node))


def draws_or_writes(node: fx.Node) -> bool:
    """Return whether an operation has an effect besides its results, or none twice the same."""
    return draws(node.target) or bool(written_operands(node))


def _along(node: fx.Node) -> set[int] | None:
    """Return the dimensions of a function of rows that it changes; None for other operations."""
    if node.target is aten.contiguous.default:
        return set()
    if node.target is aten.narrow.default or getattr(node.target, "along", False):
        return {node.args[1]}
    return None


def _collective_rule(node: fx.Node) -> FactorRule:
    """Return the rule of a collective: elementwise, but for dimensions whose shards change."""
    rest = node.args[1:]
    changed = {arg for arg in rest if type(arg) is int}
    if node.target is not permute:
        return _rule_along(node, changed)
    before, after, size = rest
    changed |= {
        d for text in (before, after) for d, a in enumerate(ShardSpec.parse(text).dims) if a
    }

    def arguments(args: tuple, kwargs: dict, shapes: Shapes) -> tuple[tuple, dict]:
        (shape,) = shapes.results
        whole = tuple(n if d in changed else shape[d] for d, n in enumerate(size))
        return (*args[:-1], whole), kwargs

    return _rule_along(node, changed, LocalForm(arguments=arguments))


def _rule_along(node: fx.Node, dims: Collection[int], local: LocalForm = LocalForm()) -> FactorRule:
    """Return the rule of an operation that is elementwise but for some dimensions."""
    x, result = _tensor(node.args[0]), _tensor(node)
    names = factors("d", result.dim())
    sides = [
        [f"{side}{name}" if i in dims else name for i, name in enumerate(names)]
        for side in ("in_", "out_")
    ]
    whole = [name for side in sides for name in side if name not in names]
    call = Call(node.target, (), {}, (x,), (result,))
    return call.rule(sides[:1], sides[1:], replicated=whole, local=local)
