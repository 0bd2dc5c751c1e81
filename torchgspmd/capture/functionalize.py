"""Functional tensors in a trace: in-place updates become new values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.operators import aten, draws
from ..compat.private_apis import (
    DispatchKey,
    FunctionalTensor,
    FunctionalTensorMode,
    OpOverload,
    _to_functional_tensor,
    get_proxy_mode,
    get_proxy_slot,
    is_functorch_wrapped_tensor,
)
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError, user_line
from .draws import one_draw
from .eager_kernels import are_without_elements, ask_kernel, with_dtypes
from .rewrites.value_free import SELECTING
from .state.mutations import Tables
from .state.source import Source, step_name
from .state.state_inputs import Retrace
from .state.value_guards import ValueGuards
from .state.writes import check_alike
from .trace_context import at_once
from .traced_values import unwrap

_CHECKS = {aten._linalg_check_errors.default}
_SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.count_nonzero.default}
_ITEM = aten._local_scalar_dense.default
# Recorded without elements, too: a backward's seeds are found by their ones_like.
_KEPT = {aten.empty.memory_format, aten.ones_like.default}


class Functional(FunctionalTensorMode):
    """A trace's functionalization mode.

    It drops checks on values, which a trace does not have.
    """

    def __init__(self, tables: Tables, value_guards: ValueGuards) -> None:
        super().__init__()
        self.tables, self.value_guards = tables, value_guards
        value_guards.source_of = self._source_of
        # views of tensors that are no inputs, each with its base's source, by id
        self.views: dict[int, tuple[Tensor, Source | None]] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        # A trace has no values to check.
        if func in _CHECKS:
            return None
        if func is _ITEM:
            if (constant := self.ask(args[0])) is not None:
                return constant.item()
            # The number becomes part of the program, guarded by the tensor's value.
            if (source := self._source_of(args[0])) is not None:
                with at_once():
                    self.value_guards.record(source, user_line())
        if (
            func in SELECTING
            and (constant := self._evaluate_selection(func, args, kwargs or {})) is not None
        ):
            return constant
        if func._schema.is_mutable:
            for parameter, value in zip(func._schema.arguments, args):
                if (
                    # A write to a constant of the trace would happen once, not in every run.
                    parameter.alias_info is not None
                    and (source := self._source_of(value)) is not None
                ):
                    self._list(source)
        empty, dtypes = (None, ()) if func in _KEPT else ask_kernel(func, args, kwargs or {})
        if empty is not None:
            return self._of_nothing(empty)
        drawn = one_draw() if draws(func) else nullcontext()
        try:
            with _interpolation_in_one_piece(func), drawn:
                result = super().__torch_dispatch__(func, types, args, kwargs)
        except RuntimeError:
            # torch runs an update in place on meta tensors first, where some cannot have sizes
            # that only a run knows, such as clamp_.
            if (value := self._out_of_place(func, args, kwargs or {})) is None:
                raise
            with self:
                return args[0].copy_(value)
        if func.namespace == "aten" and not (func.is_view or func._schema.is_mutable):
            if func not in _KEPT and are_without_elements(result):
                return self._of_nothing(result)
        if func is _ITEM and isinstance(result, torch.SymInt) and self._is_count(args[0]):
            torch._check(result >= 0)  # so that a branch on it may take it for more than none
        if func.is_view and isinstance(result, Tensor) and not isinstance(result, FunctionalTensor):
            # A view of a state tensor is that tensor: a write to it has to be seen. The view
            # is stored, so that its id is not reused.
            self.views[id(result)] = result, self._source_of(args[0])
        if func.is_view or func._schema.is_mutable:
            return result
        result = pytree.tree_map_only(Tensor, self._as_functional, result)
        if not dtypes:
            return result
        with self:
            return with_dtypes(result, dtypes)

    def _as_functional(self, tensor: Tensor) -> Tensor:
        """Return a result as a functional tensor.

        torch does not wrap results from operations without functional operands.
        """
        return (
            tensor
            if isinstance(tensor, FunctionalTensor)
            else FunctionalTensor(_to_functional_tensor(tensor), self)
        )

    def _of_nothing(self, results: object) -> Any:
        """Return tensors without elements that no operation computes."""
        with self:
            return pytree.tree_map_only(
                Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device=t.device), results
            )

    def ask(self, tensor: Tensor, is_shape: bool = False) -> Tensor | None:
        """Return a tensor's values if they are known during the trace, else None.

        is_shape: the values decide on a shape.
        """
        node, root = self.node_of(tensor), get_proxy_mode().tracer.root
        with at_once():
            if node is not None:
                return self.value_guards.ask(node, root, user_line(), is_shape)
            if not is_shape or type(tensor) is not Tensor or is_functorch_wrapped_tensor(tensor):
                return None
            source = self._source_of(tensor) or Source({"a tensor": tensor}, ("a tensor",))
            return tensor if self.value_guards.record(source, user_line()) else None

    def node_of(self, tensor: Tensor) -> fx.Node | None:
        """Return the node that computes a tensor; None if it is no value of the trace."""
        value = unwrap(tensor) if isinstance(tensor, FunctionalTensor) else tensor
        slot = get_proxy_slot(value, get_proxy_mode().tracer, None)
        return None if slot is None else slot.proxy.node

    def _is_count(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a sum of truth values."""
        node = self.node_of(tensor)
        if node is None or node.target not in _SUMS:
            return False
        return node.all_input_nodes[0].meta["val"].dtype is torch.bool

    def rows(self, mask: Tensor) -> tuple[Tensor, ...] | None:
        """Return the indices that a mask selects, a constant for each dimension.

        Return None if the mask's values are not known.
        """
        if (values := self.ask(mask, True)) is None:
            return None
        with at_once():
            rows = values.nonzero().unbind(1)
        return self._constants(rows)

    def _constants(self, values: object) -> Any:
        with self:
            return pytree.tree_map_only(Tensor, aten.lift_fresh.default, values)

    def _evaluate_selection(self, func: OpOverload, args: tuple, kwargs: dict) -> Any:
        """Return an operation's results on known values as constants, else None."""
        constants = {
            id(t): self.ask(t, True)
            for t in pytree.tree_leaves((args, kwargs))
            if isinstance(t, Tensor)
        }
        if any(values is None for values in constants.values()):
            return None
        with at_once():
            args, kwargs = pytree.tree_map_only(Tensor, lambda t: constants[id(t)], (args, kwargs))
            results = func(*args, **kwargs)
        return self._constants(results)

    def _out_of_place(self, func: OpOverload, args: tuple, kwargs: dict) -> Tensor | None:
        """Return the value that an operation writes into its first operand.

        None if the operand's sizes are known, or another call would draw other numbers.
        """
        name, _, overload = func.name().removeprefix("aten::").partition(".")
        if not (func._schema.is_mutable and name.endswith("_") and isinstance(args[0], Tensor)):
            return None
        if draws(func) or all(isinstance(n, int) for n in args[0].shape):
            return None
        new = getattr(getattr(torch.ops.aten, name[:-1], None), overload or "default", None)
        with self:
            value = new(*args, **kwargs) if new else None
        if value is not None and not torch.can_cast(value.dtype, args[0].dtype):
            raise RuntimeError(f"{name}: {value.dtype} cannot be written into {args[0].dtype}")
        return value

    def _list(self, source: Source) -> None:
        """Raise Retrace: a state tensor that is changed in place has to be an input."""
        if source.entry in self.tables.state.entries:
            raise ShardingError.here(
                "the program changes a tensor in place that shares its memory with "
                f"'{step_name(source.steps[-1])}'",
                why="each tensor that a module keeps is an input of its own",
                fix="keep one of them, and take views of it in forward",
            )
        raise Retrace(
            f"the program changes {source} in place", partial(self.tables.state.add, source)
        )

    def _source_of(self, value: object) -> Source | None:
        """Return a tensor's source if it is no functional tensor, else None."""
        if not isinstance(value, Tensor) or isinstance(value, FunctionalTensor):
            return None
        return self.views[id(value)][1] if id(value) in self.views else self.tables.source_of(value)


@contextmanager
def _interpolation_in_one_piece(func: OpOverload) -> Iterator[None]:
    """Keep an interpolation one operation; torch 2.9 would decompose it into gathered rows."""
    key = DispatchKey.CompositeImplicitAutograd
    body = func.py_kernels.pop(key, None) if "upsample_nearest" in func.name() else None
    try:
        yield
    finally:
        if body is not None:
            func.py_kernels[key] = body


def set_data(input: Any, data: Any) -> None:
    """Run `input.data = data` in a trace: both share memory from here on."""
    if not isinstance(input, FunctionalTensor):  # the mutation makes it an input in the next trace
        input.copy_(data)
        return
    check_alike("a tensor", input, data)
    # Memory in another layout cannot be shared: a view of the parameter would see other elements.
    if not isinstance(data, FunctionalTensor) or data.stride() != input.stride():
        with torch.no_grad():
            data = torch.empty_like(input).copy_(data)
    input.elem = data.elem
