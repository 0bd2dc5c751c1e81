"""A mode that intercepts calls to PyTorch's Python interface during a trace."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode

from ..compat.private_apis import _engine_run_backward, get_unwrapped, is_functorch_wrapped_tensor
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError, traced_line
from ..layout.mark import mark_sharding, reshard
from ..rules.rewrites import DECLINED, rewrite_of, rewrites_of
from .cached_constants import CachedConstants
from .functionalize import Functional, FunctionalTensor, set_data
from .rewrites import (  # noqa: F401 (register)
    new_tensors,
    products,
    sparse_coo,
    value_free,
    vmapped,
)
from .rewrites.chosen_loops import GATED, Gate, count_of, iterations, only_sums
from .rewrites.inline_python import bodies
from .rewrites.loop_trace import recording
from .rewrites.numpy_arrays import tensor_of
from .rewrites.value_free import SELECTIONS
from .state.state_inputs import AskedOrders
from .state.symbolic_numbers import specialize_tree
from .trace_context import OPENED, at_once
from .traced_values import is_transforming, is_vectorizing, unwrap
from .unsupported import check_dense

# The code of frames that call a module.
_CALL = getattr(nn.Module.__call__, "__code__", None)
_ITER = getattr(Tensor.__iter__, "__code__", None)


class CallInterceptor(TorchFunctionMode):
    """A mode that records each call's source line, and replaces products and values."""

    def __init__(
        self,
        tracker: SourceTracker,
        constants: CachedConstants,
        mode: Functional,
        asked: AskedOrders,
    ) -> None:
        super().__init__()
        self.tracker, self.constants, self.mode, self.asked = tracker, constants, mode, asked
        self.lists: dict[int, tuple[Tensor, Any]] = {}  # by a tensor's id, its nested list
        self.gates: list[Gate] = []  # the iterations around that may be none
        self.is_gated = False
        mode.tables.state.missing.broken = None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, IndexError | KeyError):
            self.mode.tables.state.leave_out(error)

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.tracker.before()
        self.constants.record_operands(args, kwargs)
        self.asked.record(func, args, kwargs)
        if func in (torch.tensor, torch.as_tensor):  # these read numbers without asking the object
            args, kwargs = specialize_tree(args), specialize_tree(kwargs)
            with self:
                array = tensor_of(*args[:1], dtype=kwargs.get("dtype"), device=kwargs.get("device"))
            if array is not DECLINED:
                return array if func is torch.as_tensor else array.clone()
        if func in _BACKWARDS:
            # Recomputation in a backward is seen as well.
            with self, self.tracker.inner_backward((*args, *kwargs.values())):
                return _BACKWARDS[func](*args, **kwargs)
        if func in (mark_sharding, reshard) and not _is_of_the_program(args[0]):
            raise ShardingError.here(
                f"{func.__name__} is called in the program on a tensor that is no part of it",
                why="it is neither a parameter, buffer or argument nor computed from one",
                fix="register it as a buffer, or pass it as an argument",
            )
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise ShardingError.here(
                "the program draws from a torch.Generator of its own",
                why="numbers are drawn by the place of an element, from a seed of the "
                "default generator",
                fix="leave the generator out and call torch.manual_seed, or draw outside "
                "and pass the numbers",
            )
        # `==`, since each access to Tensor.data.__set__ makes a new object.
        if func == _SET_DATA:
            return set_data(*args)
        if func is Tensor.tolist:
            return self._numbers(args[0])
        if func is Tensor.unbind and (loop := self._chosen(args[0])) is not None:
            return loop
        if func in GATED and self.gates and not self.is_gated:
            self.is_gated = True
            try:
                with self:
                    return self.gates[-1].run(func, args, kwargs)
            finally:
                self.is_gated = False
        if func in SELECTIONS and len(args) > 1 and "out" not in kwargs:
            func, args = SELECTIONS[func](self.mode, *args)
        if (
            any(map(sparse_coo.is_sparse, (*args, *kwargs.values())))
            or func is torch.sparse_coo_tensor
        ):
            return self._run_sparse(func, args, kwargs)
        for value in args if rewrite_of("product", func) else ():
            if isinstance(value, Tensor):
                check_dense(f"an operand of {func.__name__}", value)
        result = self._replaced(func, args, kwargs)
        if result is DECLINED:
            result = self._run(func, args, kwargs)
        self.tracker.after(result)
        self.constants.record_result(args, kwargs, result)
        return result

    def _replaced(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Return the result from the first replacement that applies, or DECLINED."""
        replacements = [*rewrites_of("value", func), *rewrites_of("product", func)]
        if not replacements or kwargs.get("out") is not None:
            return DECLINED
        # Some library's tensor around others, as torchao's float8, knows no operation of ours.
        if any(hasattr(x, "__tensor_flatten__") for x in (*args, *kwargs.values())):
            return DECLINED
        # torch.func takes few custom operations, and asks no tensor for a number.
        if is_transforming():
            known = [*rewrites_of("vmap", func)] if is_vectorizing() else []
            replacements = [each for each in replacements if each in known]
        for replacement in replacements:
            if not _accepts(replacement, args, kwargs):
                continue
            if (result := replacement(*args, **kwargs)) is not DECLINED:
                return result
        return DECLINED

    def _numbers(self, tensor: Tensor) -> Any:
        """Return a tensor's numbers; if only a run knows them, the same symbols each time."""
        if (values := self.mode.ask(tensor)) is not None:
            return values.tolist()
        value = unwrap(tensor) if isinstance(tensor, FunctionalTensor) else tensor
        if id(value) not in self.lists:
            with self:
                self.lists[id(value)] = value, value_free.nested_list(tensor)
        # The program may change its list, so each call gets a new one.
        return pytree.tree_map(lambda number: number, self.lists[id(value)][1])

    def _chosen(self, indices: Tensor) -> Iterator[Tensor] | None:
        """Return the iterations of a loop over what `nonzero` chose; None for another call."""
        frame = sys._getframe(2)
        if frame.f_code is not _ITER or type(indices.shape[0]) is int:
            return None
        count = count_of(self.mode.node_of(indices), indices.shape[0])
        if count is None or frame.f_back is None or not only_sums(frame.f_back):
            return None
        missing = self.mode.tables.state.missing
        return iterations(indices, count, self.gates, frame.f_back, missing)

    def _run_sparse(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        if func is torch.sparse_coo_tensor:
            result = sparse_coo.sparse_coo_tensor(*args, **kwargs)
            return func(*args, **kwargs) if result is DECLINED else result
        if (body := sparse_coo.body(func)) is None:
            return func(*args, **kwargs)
        with at_once():  # reads the entries of constants
            args, kwargs = pytree.tree_map(sparse_coo.with_entries, (args, kwargs))
        with self:
            result = body(*args, **kwargs) if _accepts(body, args, kwargs) else DECLINED
        if result is DECLINED:
            check_dense(
                f"an operand of {func.__name__}",
                next(filter(sparse_coo.is_sparse, (*args, *kwargs.values()))),
            )
        return result

    def _run(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a function, or a body that computes the same by calls that this mode sees."""
        for body in bodies(func):
            with self, recording():
                result = body(*args, **kwargs)
            if result is not DECLINED:
                return result
        if str(kwargs.get("device")) == "meta":  # inputs on meta have stand-ins on the CPU
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def _accepts(function: Callable | None, args: tuple, kwargs: dict) -> bool:
    """Return whether the function takes these arguments.

    Some PyTorch functions have several names for one argument.
    """
    try:
        return function is not None and _signature(function).bind(*args, **kwargs) is not None
    except TypeError:
        return False


_signature = cache(inspect.signature)


def autograd_grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """Run torch.autograd.grad with the interceptor active; the original switches it off."""
    outputs, inputs = ([t] if isinstance(t, Tensor) else list(t) for t in (outputs, inputs))
    if is_grads_batched:
        raise ShardingError.here(
            "torch.autograd.grad(is_grads_batched=True) cannot be captured",
            fix="call it once for every gradient",
        )
    cotangents = (
        [grad_outputs] * len(outputs)
        if grad_outputs is None or isinstance(grad_outputs, Tensor)
        else list(grad_outputs)
    )
    seeds = tuple(torch.ones_like(t) if g is None else g for t, g in zip(outputs, cotangents))
    grads = _engine_run_backward(
        tuple(outputs),
        seeds,
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        tuple(inputs),
        bool(allow_unused) or materialize_grads,
        accumulate_grad=False,
    )
    return tuple(
        torch.zeros_like(t) if g is None and materialize_grads else g for g, t in zip(grads, inputs)
    )


def _tensor_backward(
    self: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    torch.autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)


_BACKWARDS = {torch.autograd.grad: autograd_grad, Tensor.backward: _tensor_backward}


_data: Any = Tensor.data
_SET_DATA = _data.__set__


class SourceTracker:
    """Each node's source line and module, and whether it belongs to the backward.

    entry: the file that calls the traced function. model: modules have their paths in it.
    """

    def __init__(self, entry: str, model: object) -> None:
        self.entry, self.backward = entry, False
        self.paths: dict[int, str] = {}
        if isinstance(model, nn.Module):
            self.paths = {id(module): name for name, module in model.named_modules()}

    def before(self) -> None:
        """Set the metadata for nodes that the next call creates."""
        if not self.backward:
            place = {"source": traced_line(self.entry), "module": self._place()}
            fx_traceback.get_current_meta()["custom"] = {**place, "backward": False}

    def _place(self) -> str:
        """Return the user's ranges (record_function), then the innermost module's path."""
        return "/".join((*OPENED, self._module()))

    def _module(self) -> str:
        """Return the path of the innermost module that is being called."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code is _CALL:
                path = self.paths.get(id(frame.f_locals["self"]))
                if path is not None:
                    return path
            frame = frame.f_back
        return ""

    def after(self, result: object) -> None:
        """Store the place in the program in the results' autograd nodes."""
        if self.backward:
            return
        custom = fx_traceback.get_current_meta()["custom"]
        place = {"source": custom["source"], "module": custom["module"]}
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            node: Any = tensor.grad_fn if isinstance(tensor, Tensor) else None
            if node is not None:
                node.metadata.setdefault("torchgspmd", place)

    def clear(self) -> None:
        fx_traceback.get_current_meta().pop("custom", None)

    def start_backward(self, outputs: list[Tensor]) -> None:
        """Give each later node the line of the forward operation that it differentiates."""
        self._mark({"source": None, "module": "", "backward": True}, outputs)

    @contextmanager
    def inner_backward(self, arguments: object) -> Iterator[None]:
        """Mark the nodes of a backward that the program runs itself, among others as `inner`."""
        if self.backward:
            yield
            return
        outputs = [t for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor)]
        place = {"source": traced_line(self.entry), "module": self._place()}
        self._mark({**place, "backward": True, "inner": True}, outputs)
        try:
            yield
        finally:
            self.backward = False
            self.clear()

    def _mark(self, meta: dict[str, Any], outputs: list[Tensor]) -> None:
        fx_traceback.get_current_meta()["custom"] = meta
        self.backward = True
        outer = {"source": meta["source"], "module": meta["module"]}
        stack: list[Any] = [(t.grad_fn, outer) for t in outputs if t.grad_fn is not None]
        seen = set()
        while stack:
            node, inherited = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            # A node that no call has made, such as a sum of gradients, takes its user's place.
            place = node.metadata.get("torchgspmd", inherited)
            node.register_prehook(_set_meta({**meta, **place}))
            stack.extend((parent, place) for parent, _ in node.next_functions if parent is not None)


def _is_of_the_program(x: Tensor) -> bool:
    """Return whether a tensor, or the one that torch.vmap wraps in it, is a value of the trace."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return isinstance(x, FunctionalTensor)


def _set_meta(meta: dict[str, Any]) -> Callable:
    """Return a hook that sets the metadata for nodes before an autograd node runs."""

    def hook(grads: object) -> None:
        fx_traceback.get_current_meta()["custom"] = meta

    return hook
