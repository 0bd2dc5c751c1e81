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

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import fx

from ...comm.kinds import CollectiveKind, all_to_all
from ...compat.fx_nodes import written_operands
from ...compat.operators import aten
from ...fx_passes.schedule.arithmetic import flops, meta_example
from ...rules import Call, FactorRule, rule_of
from ...rules.notation import factors
from ...rules.registry import declares_order


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
        """Return what chains of equal layers have in common."""
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
            if node.target is all_to_all and node not in self.cut and node.meta.get("shape"):
                dims = (self._chain(node, d) for d in range(len(node.meta["shape"])))
                before = dict(self.cut)
                if (chain := next((c for c in dims if c is not None), None)) is None:
                    continue
                if chain.likeness in left_out:
                    self.cut = before
                else:
                    self.found.append(chain)

    def _chain(self, first: fx.Node, dim: int) -> Chain | None:
        """Return the chain behind an exchange, along a dimension; None if there is none."""
        reached = _reached(first)
        last = min((n for n in reached if n.target is all_to_all), key=self.place.get, default=None)
        if last is None:
            return None
        needed, stack = {last}, [last]
        while stack:
            new = [x for x in stack.pop().all_input_nodes if x in reached and x not in needed]
            needed.update(new)
            stack += new
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
        self.cut[node] = rule.results[0].index((factor,))
        pulled = self._pull_operands(node, factor, chain)
        chain.core[node] = factor
        return pulled

    def _pull_operands(self, node: fx.Node, factor: str, chain: Chain) -> bool:
        rule = self.rule(node)
        assert rule is not None, "it is computed in parts"
        for dims, value in zip(rule.operands, tensors_in(node)):
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


def _reached(first: fx.Node) -> set[fx.Node]:
    """Return the nodes in the same phase that need an exchange, up to the next ones."""
    reached, stack = set[fx.Node](), [first]
    while stack:
        new = [
            u for u in stack.pop().users if u not in reached and u.op == "call_function"
            and _phase(u) == _phase(first)
        ]
        reached.update(new)
        stack += [u for u in new if u.target is not all_to_all]
    return reached


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
    if isinstance(node.target, CollectiveKind):
        return _exchange_rule(node) if node.target is all_to_all else None
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags or written_operands(node):
        return None  # a draw of a part has other numbers
    if "order" in node.meta or declares_order(node.target):
        return None
    operands = tensors_in(node)
    if not operands or any(x.meta.get("unknown") for x in operands):
        return None
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), meta_example)
    tensors, result = tuple(map(meta_example, operands)), meta_example(node)
    call = Call(node.target, args, kwargs, tensors, (result,))
    along = _along(node)
    if along is not None:
        return _rule_along(call, along)
    rule = rule_of(call)
    return rule if rule.described and len(rule.results) == 1 else None


def _along(node: fx.Node) -> set[int] | None:
    """Return the dimensions of a function of rows that it changes; None for other operations."""
    if node.target is aten.contiguous.default:
        return set()
    if node.target is aten.narrow.default or getattr(node.target, "along", False):
        return {node.args[1]}
    return None


def _exchange_rule(node: fx.Node) -> FactorRule:
    x, result = meta_example(node.args[0]), meta_example(node)
    call = Call(node.target, (), {}, (x,), (result,))
    return _rule_along(call, {*node.args[1:3]})


def _rule_along(call: Call, dims: set[int]) -> FactorRule:
    """Return the rule of an operation that is elementwise but for some dimensions."""
    names = factors("d", call.results[0].dim())
    taken = [[f"{side}{name}" if i in dims else name for i, name in enumerate(names)]
             for side in ("in_", "out_")]
    whole = [name for side in taken for name in side if name not in names]
    return call.rule([taken[0]], [taken[1]], replicated=whole)
