"""Programs that cannot be captured: checks before a trace, its errors as ShardingErrors."""

from __future__ import annotations

import ast
import linecache
import re
import traceback
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, cast

import numpy
import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from ..compat.private_apis import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    GuardOnDataDependentSymNode,
    UnsupportedOperatorException,
)
from ..errors import ShardingError, innermost_frame_of, user_expression_of, user_line, user_line_of
from .branching_modules import modules_in, name_of_innermost, wrapped_alone
from .builtin_numbers import NUMBER_TYPE, namespace_of
from .rewrites.numpy_arrays import package_with_array

# Before 2.10, torch can neither trace slices by value-dependent numbers nor compute with
# truth values.
_OLD = torch.__version__ < "2.10"
# torch's errors to which the user's line is appended.
_NAMED = RuntimeError, ValueError, IndexError, TypeError
# Classes that parallelize a module by themselves.
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"}


def check_dense(what: str, tensor: Tensor) -> None:
    """Raise ShardingError for a nested or sparse tensor."""
    if tensor.is_nested:
        raise ShardingError.here(
            f"{what} is a nested tensor, and a layout is one of dense tensors",
            fix="pad it to the longest (torch.nested.to_padded_tensor), with a mask, before "
            "the program",
        )
    if tensor.layout is not torch.strided:
        raise ShardingError.here(
            f"{what} is {str(tensor.layout).removeprefix('torch.')}, and a layout is one of "
            "dense tensors",
            fix="call to_dense() on it",
        )


def check_arguments(names: Sequence[str], leaves: Sequence[object]) -> None:
    """Raise ShardingError for a NumPy array among a call's arguments."""
    for name, leaf in zip(names, leaves):
        if isinstance(leaf, numpy.ndarray):
            raise ShardingError.here(
                f"argument '{name}' is a NumPy array of shape {list(leaf.shape)}",
                why="its values would become constants of the program",
                fix=f"pass torch.from_numpy({name})",
            )


def check_module(module: nn.Module) -> None:
    """Raise ShardingError for a module that cannot be traced."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        check_dense(f"'{name}'", tensor)
        if is_lazy(tensor):
            raise ShardingError.here(
                f"parameter '{name}' has no shape yet",
                why="it is that of a lazy module",
                fix="call the model once on one device before",
            )
    for name, inner in module.named_modules():
        if wrapper := _WRAPPERS.intersection(each.__name__ for each in type(inner).__mro__):
            raise ShardingError.here(
                f"{repr(name) if name else 'the model'} is wrapped by {min(wrapper)}",
                why="the mesh shards the batch and the weights, and reduces gradients",
                fix="leave the wrapper out, and wrap the model itself: parallelize(model, mesh, "
                "in_specs='auto'), with shard_updates='data' to store weights in parts",
            )
    scripted = next(
        (name for name, m in module.named_modules() if isinstance(m, torch.jit.ScriptModule)), None
    )
    if scripted is not None:
        raise ShardingError.here(
            f"module '{scripted or type(module).__name__}' is compiled by TorchScript, "
            "which cannot be captured",
            fix="give the module that torch.jit.script was called on",
        )


# Python's functions that need a number now, and their replacements in a program.
_IN_PLACE_OF = {
    "int": "t.item() in place of int(t)",
    "float": "t.item() in place of float(t)",
    "bool": "torch.where or a mask in place of bool(t)",
    "max": "torch.sym_max(a, b) in place of max(a, b)",
    "min": "torch.sym_min(a, b) in place of min(a, b)",
}


def needs_values(
    what: str,
    where: str | None,
    call: str | None = None,
    alone: str | None = None,
    dynamic: bool = False,
) -> ShardingError:
    """Return the error for a program that asks for values which a trace does not have.

    call: the Python function that asked, if one did. alone: submodules that do not ask.
    dynamic: whether argument sizes are such values.
    """
    others = "; or leave the size out of dynamic=" * dynamic + _others(alone)
    if call in _IN_PLACE_OF:
        return ShardingError(
            f"the program depends on values: {call}() needs a number that is known only when it "
            "runs",
            where=where,
            why="one program is made for all values, before any device computes",
            fix=f"use {_IN_PLACE_OF[call]}, or compute it outside and pass it as an argument"
            + others,
        )
    slices = "; on torch 2.9, for x[:n]: x.index_select(0, torch.arange(n))" if _OLD else ""
    return ShardingError(
        f"the program depends on values: {what} needs numbers that are known only when it runs",
        where=where,
        why="one program is made for all values, before any device computes",
        fix="use torch.where or a mask instead of a branch, or compute it outside and pass "
        "it as an argument" + slices + others,
    )


def _others(alone: str | None) -> str:
    """Return the end of a fix that names the submodules which do not ask for values."""
    return f"; or wrap its submodules, each alone: {alone}" if alone else ""


def _loop_error(error: BaseException) -> ShardingError | None:
    """Return the error for a loop over rows that values chose; None if the line is no loop."""
    # The frame has the loop's line, and its iterable by name.
    trace = innermost_frame_of(error)
    if trace is None or (name := _looped_over(trace)) is None:
        return None
    if not isinstance(trace.tb_frame.f_locals.get(name), Tensor):
        return None
    module = name_of_innermost(error.__traceback__)
    return ShardingError(
        f"the program depends on values: a loop over '{name}', whose rows are known only when it "
        "runs",
        where=user_line_of(error) if module is None else f"{user_line_of(error)}, in '{module}'",
        why="one program is made for all values, before any device computes",
        fix="loop over all that could be chosen (what was not computes 0 rows), or sort the rows "
        "by what they chose and multiply all at once by torch.nn.functional.grouped_mm; models of "
        'transformers do so after set_experts_implementation("grouped_mm")'
        + _others(wrapped_alone(error.__traceback__)),
    )


def _looped_over(trace: TracebackType) -> str | None:
    """Return the name behind `for ... in` in a traceback's line; else None."""
    line = linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno).strip()
    with suppress(SyntaxError):
        # A line with `for` parses only with a body.
        loop = ast.parse(f"{line} pass").body[0]
        if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Name):
            return loop.iter.id
    return None


def _python_call(error: BaseException) -> str | None:
    """Return the name that user code called, in its innermost frame in a traceback."""
    expression = user_expression_of(error)
    with suppress(SyntaxError):
        tree = ast.parse(expression, mode="eval").body if expression else None
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
            return tree.func.id
    return None


def _without_numbers(translated: ShardingError, error: BaseException) -> ShardingError:
    """Note in an error the namespace whose int() and the like may be to blame."""
    translated.namespace = namespace_of(innermost_frame_of(error))
    return translated


def check_constants(graph: fx.Graph, owner: nn.Module) -> None:
    """Raise ShardingError if a constant in the graph has no values."""
    for node in graph.find_nodes(op="get_attr"):
        if isinstance(getattr(owner, node.target, None), FakeTensor):
            what, fix, why = _NO_VALUES
            raise ShardingError(what, where=node.meta.get("source"), why=why, fix=fix)


_NO_VALUES = (
    "the program uses a tensor without values, which somebody has kept from an earlier trace",
    "keep it in an attribute of the module, or return it",
    "what a trace computes of its inputs has values only when it runs",
)


class _Row(NamedTuple):
    """An error of torch in a trace, by its type and words, and the ShardingError for it.

    {} in `what` takes a group of the words.
    """

    kinds: type[Exception] | tuple[type[Exception], ...]
    words: str
    what: str
    fix: str
    why: str | None = None


_ROWS = (
    _Row(
        TypeError,
        NUMBER_TYPE,
        "int or float is a dtype in code that calls it on a number that only a run knows",
        "write torch.int64 in place of int, torch.float64 in place of float",
    ),
    _Row(
        TypeError,
        r"(?:Sym\w+|FunctionalTensor|FakeTensor)\.__format__",
        "a number that is known only when the program runs is printed in a format",
        "return the number and print it outside",
        "one program is made for all values, before any device computes",
    ),
    _Row(
        RuntimeError,
        r"found at least two devices, (\S+) and (\w+(?::\d+)?)",
        "forward combines tensors on {} and {}",
        "create tensors there: torch.ones(8, device=x.device), or register a buffer",
        "a program runs where its arguments are",
    ),
    _Row(
        TypeError,
        r"must be Tensor, not (tuple|list|dict)",
        "an operation gets a {} where it needs a tensor",
        "call plan(model, x, mesh=mesh) in place of plan(model, (x,), mesh=mesh)",
        "arguments are passed one by one, as forward takes them",
    ),
    *_OLD
    * (
        _Row(
            TypeError,
            "SymBool",
            "torch 2.9 cannot compute with a truth value that is known only when the program runs",
            "keep it a tensor: (x == y).all() instead of torch.equal(x, y)",
        ),
    ),
    _Row(
        (AssertionError, RuntimeError),
        r"from the function c10d\.|torch\.distributed\.nn\.functional",
        "the program communicates by itself, through torch.distributed",
        "leave the communication out: a sum, mean or cat of the batch is that of all devices",
        "its tensors are whole ones: what is sent between devices is found by sharding them",
    ),
    _Row(
        TypeError,
        r"^(_foreach_[^(]*)",
        "{} is given numbers that are known only when it runs",
        "use foreach=False",
        "a list of numbers cannot hold them",
    ),
    _Row(
        RuntimeError,
        r"^\.numpy\(\) is not supported",
        "the program turns a tensor into a NumPy array, which has values only when it runs",
        "compute it with torch, or outside and pass it as an argument",
    ),
    _Row(
        RuntimeError,
        "its data is not allocated yet",
        "the program depends on values: an operation reads numbers that are known only when it "
        "runs",
        "pad packed sequences, with a mask; or compute it outside and pass it as an argument",
        "one program is made for all values, before any device computes",
    ),
    _Row(
        RuntimeError,
        "Values and compressed tensor instance need to be on the same device",
        "forward creates a compressed sparse matrix (CSR, CSC, BSR or BSC)",
        "write torch.sparse_coo_tensor(torch.stack([rows, columns]), values, size); the rows of a "
        "CSR matrix are torch.repeat_interleave(torch.arange(n), crow_indices.diff(), "
        "output_size=len(values))",
        "a layout is one of dense tensors, such as a COO matrix's indices and values",
    ),
    _Row(RuntimeError, "FunctionalTensor on its own", *_NO_VALUES),
    _Row(
        RuntimeError,
        "vmap: It looks like you're attempting to use a Tensor in some data-dependent",
        "the program branches on a value in a stage of a pipeline, or under torch.vmap",
        "torch.where computes both sides; leave checks of labels out of the model",
        "one program is made for all values, and it runs for all stages or rows",
    ),
    _Row(
        RuntimeError,
        r"mutating directly with `\.data` under vmap",
        "forward changes weights in a stage of a pipeline, as module.to() does",
        "cast the weights before the pipeline is made, and leave module.to() out of forward",
        "a stage's weight is a row of a parameter that all stages share",
    ),
    _Row(
        RuntimeError,
        "mutating a non-functional tensor",
        "the program changes a tensor in place that is no argument and found under no name, such "
        "as a default",
        "make it a buffer or attribute of the module, or pass it as an argument",
        "it is none of the program's inputs, and would stay as it is",
    ),
    _Row(
        RuntimeError,
        "(?s)SymInt.*not tracked with proxy|not tracked with proxy.*SymInt",
        "the program makes a tensor of a size that has no number",
        "pad nested tensors to the longest (torch.nested.to_padded_tensor), with a mask",
        "it is that of a nested tensor, or of one that comes of values",
    ),
    _Row(
        NotImplementedError,
        r"HigherOrderOperator (\w+)",
        "this cannot be captured: {}, whose branches or body are programs of their own",
        "use torch.cond, scan, map or while_loop, or a loop of Python",
    ),
)


class translate_errors:
    """A context manager that turns "cannot be captured" errors into ShardingErrors.

    The program's other errors stay as they are; torch's own name the program's line. dynamic:
    whether argument sizes are symbols.
    """

    def __init__(self, dynamic: bool = False) -> None:
        self.dynamic = dynamic

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: Any, _: object) -> None:
        sized = isinstance(error, RuntimeError) and any(
            text in str(error)
            for text in (
                "expected to contain only concrete integers",
                "with symbolic sizes/strides",
            )
        )
        if sized or isinstance(
            error,
            (
                DataDependentOutputException,
                DynamicOutputShapeException,
                GuardOnDataDependentSymNode,
            ),
        ):
            if (loop := _loop_error(error)) is not None:
                raise _without_numbers(loop, error) from error
            what = str(
                getattr(
                    error, "func", "an `if`, a loop or a slice" if _OLD else "an `if` or a loop"
                )
            )
            raise _without_numbers(
                needs_values(
                    what,
                    user_line_of(error),
                    _python_call(error),
                    wrapped_alone(error.__traceback__),
                    self.dynamic,
                ),
                error,
            ) from error
        if isinstance(error, UnsupportedOperatorException):
            raise ShardingError(
                f"this cannot be captured: {cast(Any, error).func}",
                where=user_line_of(error),
                why="it does not run on tensors without values",
                fix="compute it outside and pass it as an argument, or write it with dense tensors",
            ) from error
        if isinstance(error, Exception) and (package := package_with_array(error)) is not None:
            raise ShardingError(
                f"forward passes a NumPy array of values that only a run knows to {package}",
                where=user_line_of(error),
                why="torch, which computes NumPy's functions in the program, has none of it",
                fix="compute it with torch, or outside and pass it as an argument",
            ) from error
        for row in _ROWS:
            found = re.search(row.words, str(error)) if isinstance(error, row.kinds) else None
            if found is not None:
                what = row.what.format(*found.groups())
                where = user_line_of(error) or user_line()
                raise ShardingError(what, where=where, why=row.why, fix=row.fix) from error
        if isinstance(error, Exception):
            name_line(error)


def name_line(error: Exception) -> None:
    """Append the user's line to the text of torch's error, raised while capturing.

    Its type stays. An error that the user's own code raises stays as it is: its traceback ends
    there.
    """
    text = error.args[0] if len(error.args) == 1 else None
    if type(error) not in _NAMED or not isinstance(text, str) or _is_raised_by_user(error):
        return
    lines = [text]
    if (where := user_line_of(error)) is not None:
        frame = traceback.extract_tb(innermost_frame_of(error), limit=1)[0]
        lines.append(f"  where {where}: {frame.line}")
    if name := name_of_innermost(error.__traceback__):
        *_, module = modules_in(error.__traceback__)
        leaf = not any(module.children())
        lines.append(f"  in    {name}, {module if leaf else 'a ' + type(module).__name__}")
    error.args = ("\n".join(lines),)


def _is_raised_by_user(error: Exception) -> bool:
    """Return whether the innermost frame in an error's traceback is the user's."""
    innermost = innermost_frame_of(error)
    return innermost is not None and innermost.tb_next is None
