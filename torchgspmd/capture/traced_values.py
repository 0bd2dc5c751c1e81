"""A trace's tensors: values of functional ones, torch.func transforms, reach by autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any

from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from ..compat.operators import draws
from ..compat.private_apis import (
    FunctionalTensor,
    TorchDispatchMode,
    _from_functional_tensor,
    _sync,
    get_interpreter_stack,
    get_proxy_mode,
    get_proxy_slot,
    get_unwrapped,
    is_functorch_wrapped_tensor,
)
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError
from ..rules import has_own_seed


def is_transforming() -> bool:
    """Return whether torch.func differentiates or vectorizes the current call."""
    return bool(get_interpreter_stack())


def is_vectorizing() -> bool:
    """Return whether torch.vmap, and no other torch.func transform, wraps the current call."""
    stack = get_interpreter_stack() or []
    return bool(stack) and all(level.key().name == "Vmap" for level in stack)


def needs_gradient(x: Tensor) -> bool:
    """Return whether a tensor needs a gradient: torch.vmap's tensors say that they do not."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x.requires_grad


def unwrap(tensor: Any) -> Tensor:
    """Return a functional tensor's current value."""
    _sync(tensor)
    return _from_functional_tensor(tensor.elem)


def forget_constants(tensors: Sequence[Tensor]) -> None:
    """Clear the numbers that torch keeps of these: it computes an operation on constants at once.

    A loop's carry is a constant in the first iteration at most.
    """
    mode: Any = get_proxy_mode()
    if mode is None:
        return
    for x in tensors:
        value: Any = unwrap(x) if isinstance(x, FunctionalTensor) else x
        value.constant = None
        if (slot := get_proxy_slot(value, mode.tracer, None)) is not None:
            slot.constant = None


def was_mutated(tensor: Tensor, before: Tensor) -> bool:
    """Return whether a functional tensor has another value than before."""
    return unwrap(tensor) is not before


def operands_read(
    run: Callable[[], tuple[list[Any], Any]], operands: Sequence[object]
) -> tuple[tuple[list[Any], Any], list[frozenset[int]]]:
    """Run a part of a trace; return (results, anything), and the operands that each result reads.

    Its operations become a part of the program only if other parts read their results.
    """
    if (mode := get_proxy_mode()) is None:  # sizes are looked for, without a graph
        results = run()
        return results, [frozenset(range(len(operands)))] * len(results[0])
    graph = mode.tracer.graph
    numbers: dict[fx.Node | None, set[int]] = {}
    for number, operand in enumerate(operands):
        if isinstance(operand, Tensor):
            numbers.setdefault(_node_of(operand), set()).add(number)
    node = next(reversed(graph.nodes))
    results = run()
    while (node := node.next).op != "root":
        numbers[node] = set().union(*(numbers.get(x, ()) for x in node.all_input_nodes))
    tensors = [x if isinstance(x, Tensor) else None for x in results[0]]
    nodes = [None if x is None else _node_of(x) for x in tensors]
    return results, [frozenset() if x is None else frozenset(numbers.get(x, ())) for x in nodes]


def are_same_operations(ones: Sequence[Tensor], others: Sequence[Tensor]) -> list[fx.Node] | None:
    """Return the nodes from which both parts of a trace compute the same; None if they differ."""
    pairs = [(_node_of(one), _node_of(other)) for one, other in zip(ones, others)]
    seen: set[tuple[Any, Any]] = set()
    shared: list[fx.Node] = []
    while pairs:
        one, other = pair = pairs.pop()
        if pair in seen:
            continue
        seen.add(pair)
        if one is other:
            shared += [] if one is None else [one]
            continue
        if one is None or other is None or one.op != "call_function" or one.target != other.target:
            return None
        leaves, tree = pytree.tree_flatten((one.args, one.kwargs))
        of_other, other_tree = pytree.tree_flatten((other.args, other.kwargs))
        if tree != other_tree:
            return None
        for x, y in zip(leaves, of_other):
            if isinstance(x, fx.Node) and isinstance(y, fx.Node):
                pairs.append((x, y))
            elif isinstance(x, fx.Node) or type(x) is not type(y) or x != y:
                return None
    return shared


def reads_directly(nodes: Sequence[fx.Node], tensors: Sequence[Tensor]) -> bool:
    """Return whether one of these nodes is a tensor's."""
    return not {*nodes}.isdisjoint(map(_node_of, tensors))


def is_computed_leaf(value: object) -> bool:
    """Return whether a trace computes a tensor that has a gradient of its own."""
    if not isinstance(value, Tensor) or not (value.requires_grad and value.is_leaf):
        return False
    node = _node_of(value)
    return node is not None and node.op == "call_function"


def _node_of(tensor: Tensor) -> fx.Node | None:
    """Return the node of a trace that computes a tensor; None for a constant."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    value = unwrap(tensor) if isinstance(tensor, FunctionalTensor) else tensor
    slot = get_proxy_slot(value, get_proxy_mode().tracer, None)
    return None if slot is None else slot.proxy.node


class SavedValue:
    """Replaces torch.utils.checkpoint._VersionWrapper by the tensor's value when it is saved.

    Values saved by a selective checkpoint stay, though a later operation writes over the tensor.
    """

    def __init__(self, value: object) -> None:
        self.value = unwrap(value) if isinstance(value, FunctionalTensor) else value

    def get_val(self, allow_cache_entry_mutation: bool) -> Any:
        """Return the value, as a new functional tensor."""
        value = self.value
        return FunctionalTensor.to_functional(value) if isinstance(value, Tensor) else value


_ACCUMULATE = "torch::autograd::AccumulateGrad"


def connected_components(outs: list[Tensor]) -> list[int]:
    """Return for each output the first output that its autograd graph is connected to.

    Two outputs are connected if one operation comes before both, or before both and a third one.
    """
    root: list[int] = [*range(len(outs))]
    owners: dict[Any, int] = {}

    def first(i: int) -> int:
        while root[i] != i:
            i = root[i]
        return i

    for i, out in enumerate(outs):
        stack = [out.grad_fn]
        while stack:
            node = stack.pop()
            if node is None or node.name() == _ACCUMULATE:
                continue
            if node not in owners:
                owners[node] = i
                stack += [n for n, _ in node.next_functions]
            # The smaller number becomes the root, so that it is the component's first output.
            elif (other := first(owners[node])) != (own := first(i)):
                root[max(other, own)] = min(other, own)
    return [first(i) for i in range(len(outs))]


def reachable_inputs(outs: list[Tensor], inputs: list[Tensor]) -> list[int]:
    """Return a bit set for each output, with the inputs that gradients flow to: bit k is input k.

    An input may be a result of operations. An output does not reach itself.

    Raises ShardingError if a gradient would flow to another leaf tensor, where it would be lost.
    """
    bits: dict[Any, int] = {}
    for k, tensor in enumerate(inputs):
        place = _place_in_graph(tensor)
        bits[place] = bits.get(place, 0) | 1 << k
    reachable: dict[Any, int] = {}
    stack: list[Any] = [out.grad_fn for out in outs if out.grad_fn is not None]
    while stack:
        # A stack, not recursion: autograd graphs are deeper than Python's recursion limit.
        node = stack[-1]
        before = [n for n, _ in node.next_functions if n is not None]
        rest = [n for n in before if n not in reachable] if node not in reachable else ()
        stack += rest
        if rest:
            continue
        stack.pop()
        leaf = node.variable if node.name() == _ACCUMULATE else None
        if leaf is not None and not isinstance(leaf, FunctionalTensor):
            raise ShardingError.here(
                f"forward uses a tensor {list(leaf.shape)} that requires a gradient, and is "
                "no parameter, argument or tensor in an attribute, list or dict",
                why="a gradient is computed for what the program is given: it would be lost "
                "silently",
                fix="make it a parameter of the module or an argument, or detach() it; a "
                "functools.partial, a default and a set do not say where it is; if the module "
                "keeps what an earlier call computed, empty that, or call under torch.no_grad()",
            )
        through = (
            reachable[n] | bits.get((n, k), 0) for n, k in node.next_functions if n is not None
        )
        reachable[node] = reduce(or_, through, bits.get(id(leaf), 0))
    return [bits.get(id(out), 0) if out.grad_fn is None else reachable[out.grad_fn] for out in outs]


def _place_in_graph(tensor: Tensor) -> object:
    """Return a key for an autograd graph's edge, or for a leaf."""
    return id(tensor) if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


# The outside values that a loop body uses, and whether it draws random numbers.


class Record(TorchFunctionMode):
    """Notes operands that need a gradient and that nothing has computed since its start.

    draws: whether random numbers are drawn without a seed of ours. seeds: whether with one.
    """

    def __init__(self, own: Sequence[Tensor], every: bool) -> None:
        super().__init__()
        self.outer: dict[int, Tensor] = {}
        self.results: list[Tensor] = []
        self.draws = self.seeds = False
        self.every = every
        self.of_the_body = {id(x): x for x in own}

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: Any = None
    ) -> Any:
        self.use(pytree.tree_leaves((args, kwargs or {})))
        result = func(*args, **(kwargs or {}))
        self.add(pytree.tree_leaves(result))
        return result

    def use(self, operands: Sequence[object]) -> None:
        for x in operands:
            if not isinstance(x, Tensor) or is_functorch_wrapped_tensor(x):
                continue  # torch.vmap wraps values that are noted
            if (self.every or x.requires_grad) and id(x) not in self.of_the_body:
                self.outer.setdefault(id(x), x)

    def add(self, results: Sequence[Any]) -> None:
        self.of_the_body.update((id(x), x) for x in results if id(x) not in self.outer)


class Draws(TorchDispatchMode):
    """Notes whether random numbers are drawn."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if draws(func):
            self.record.draws |= not has_own_seed(func)
            self.record.seeds = True
        return func(*args, **(kwargs or {}))
