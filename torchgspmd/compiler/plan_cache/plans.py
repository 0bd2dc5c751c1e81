"""A plan as JSON, and back to a plan of this process's model."""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from ...capture import BUFFER, PARAMETER, Captured, Input
from ...capture.state.bytecode_names import dotted_names, imports_own_modules, is_installed
from ...capture.state.guards import Guards
from ...capture.state.recorder import Reach
from ...capture.state.run_guards import ArgumentKeys, FunctionFacts, RunGuards
from ...comm.json_rows import conforms, field_types
from ...errors import ShardingError
from ...fx_passes.program import Boundary, Request, RunnablePlan
from ...layout.mesh import Mesh
from . import json_text
from .decoder import REFUSALS, Decoder, natural, typed
from .graph_codec import decode_graph, encode_graph, identifier
from .guard_text import GuardDecoder, GuardEncoder, check_rows
from .json_text import Malformed, Stale, Unshareable
from .signature import bytes_of, check_signature
from .values import Encoder

DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "npu", "xla")  # types that constants may be on
LARGEST = 1 << 14  # elements of a constant in a text
# Names by which a function reads what no guard compares.
_UNSEEN = {"environ", "getenv", "get_rank", "get_local_rank", "get_node_local_rank", "urandom"}
_UNSEEN_MODULES = {"random", "time", "secrets", "uuid", "datetime"}
_BY_HAND = {"graph", "constants", "tensors", "reads", "functions", "run_guards", "breakpoints"}
NEEDED = ("inputs", "outputs", "has_backward", "opened")  # to look at a plan
FIELDS = sorted({f.name for f in dataclasses.fields(Captured)} - _BY_HAND)
# What is asked of a program; the rest of a request is the program, or the same for all plans.
REQUEST = sorted(
    {f.name for f in dataclasses.fields(Request)}
    - {"captured", "mesh", "expand", "keep_marks", "shared"}
)
_PROPERTIES = (
    *("replicated_ops", "overruled_marks", "idle_axes", "gathered_results"),
    *("is_dynamic", "draws"),
)
_LATER = ("sharded", "source")  # graphs that nobody runs: each is a line of JSON


P = TypeVar("P", bound=RunnablePlan)


class Later:
    """An object whose attributes are computed at the first read."""

    _later: Mapping[str, Callable[[], Any]] = MappingProxyType({})

    def __getattr__(self, name: str) -> Any:
        if name not in self._later:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        value = vars(self)[name] = self._later[name]()
        return value


class _CapturedOfText(Later, Captured):
    """A captured program whose graph is decoded later."""

    def kept_tensors(self, owners: Mapping[int, str]) -> list[tuple[str, Tensor]]:
        """List the graph's constant tensors; without any constants the graph stays undecoded."""
        has_constants = next(self.constants.buffers(), None) is not None
        return super().kept_tensors(owners) if has_constants else []


def encode_plan(plan: RunnablePlan, model: nn.Module) -> str:
    """Return a plan as text: three JSON lines.

    Raises:
        Unshareable: Its program depends on a value that has no text.
    """
    captured, encoder = plan.captured, Encoder()
    # Raise Unshareable if a function may read unseen values that differ between processes.
    for function in captured.functions:
        if is_installed(function.__module__):
            continue
        # An import in a function reads a module that no guard has seen.
        if imports_own_modules(function.__code__):
            raise Unshareable(f"{function.__qualname__} imports")
        for names in dotted_names(function.__code__):
            if not _UNSEEN.isdisjoint(names) or not _UNSEEN_MODULES.isdisjoint(names[:-1]):
                raise Unshareable(f"{function.__qualname__} names {'.'.join(names)}")
    guards = GuardEncoder(model, captured).encode()
    fields = {name: encoder.encode(getattr(captured, name)) for name in FIELDS}
    constants = dict(constants_of(captured, plan.program_graph, LARGEST))
    code = captured.run_guards.functions if captured.run_guards else FunctionFacts(Reach(model))
    known = {"guards": guards, "methods": code.methods.described(), "constants": constants}
    text = {**known, **encode_graphs(plan, fields, encoder)}
    later = [text.pop(name) for name in _LATER]
    return "\n".join(map(json_text.dump, (text, *later)))


def encode_graphs(
    planned: RunnablePlan, fields: dict[str, object], encoder: Encoder
) -> dict[str, Any]:
    """Return a plan's graphs as JSON, with the encoded fields of its Captured."""
    body = {
        "captured": fields,
        "source": encode_graph(planned.captured.graph, encoder),
        "sharded": encode_graph(planned.sharded, encoder),
        "program": encode_graph(planned.program_graph, encoder),
        "boundary": [encoder.encode(x) for x in vars(planned.boundary).values()],
        "request": encode_request(planned.request, encoder),
        "properties": {name: encoder.encode(getattr(planned, name)) for name in _PROPERTIES},
    }
    # The records are complete only now: encoding the graphs has added to them.
    return {"records": encoder.records, **body}


def encode_request(request: Request | None, encoder: Encoder) -> Any:
    """Encode a plan's request, from which it can be planned again; None if it cannot."""
    if request is None:
        return None
    try:
        return {name: encoder.encode(getattr(request, name)) for name in REQUEST}
    except Unshareable:
        return None


def decode_plan(text: str, model: nn.Module, mesh: Mesh, plan_class: type[P]) -> P:
    """Decode a plan for the model.

    Raises:
        Stale: The model, or a value that its forward reads, has changed; or the text is no plan.
    """
    first, *later = text.split("\n")
    rows = typed(json_text.load(first), None, dict, "a plan")
    try:
        # Guards first: a model that has changed is refused before graphs are read.
        guards = GuardDecoder(model)
        reads = guards.decode(typed(rows, "guards", list, "a list of guards"))
        rows |= zip(_LATER, later, strict=True)
        decoder = Decoder(rows.get("records"), mesh)
        plan = decode_graphs(rows, decoder, plan_class, partial(tensors_of, model), reads)
        names = [f"number {i}" for i in range(len(plan.captured.leaves))]
        arguments = ArgumentKeys.of_file(names, plan.captured.leaves)
        facts = FunctionFacts(Reach(model))
        check_rows(facts.methods.described(), rows, "methods")
        plan.captured.run_guards = RunGuards(arguments, None, facts)
        return plan
    except Malformed as fault:
        raise fault.located(rows) from None
    except REFUSALS as error:
        raise Stale(f"the text is no plan: {error}") from error


def decode_graphs(
    text: dict[str, object],
    decoder: Decoder,
    plan_class: type[P],
    tensors: Callable[[tuple[Input, ...]], list[Tensor]],
    guards: Guards,
) -> P:
    """Decode a plan; its graphs wait until they are read, but for the one that runs.

    tensors: returns parameters and buffers, given the inputs.
    """
    mesh = decoder.mesh
    constants = _constants(text, decoder)
    names = dict(constants.named_buffers())

    def graph(name: str) -> fx.Graph:
        rows = text[name]
        return decode_graph(json_text.load(rows) if isinstance(rows, str) else rows, decoder, names)

    def later(name: str) -> fx.Graph:
        if not isinstance(text[name], str):  # a file, which is read as a whole
            return graph(name)
        try:
            return graph(name)
        except (Stale, *REFUSALS) as error:
            raise ShardingError(f"the text of this plan is damaged: {error}") from error

    fields = _fields(text, decoder)
    # No __init__: it asks for the graph, which is decoded when it is first read.
    captured = _CapturedOfText.__new__(_CapturedOfText)
    vars(captured).update(
        fields,
        constants=constants,
        tensors=tensors(fields["inputs"]),
        reads=guards,
        _later={"graph": lambda: later("source")},
    )
    plan = plan_class.__new__(plan_class)
    program, boundary = graph("program"), _boundary(text, decoder)
    check_signature(captured, program, boundary, mesh)
    vars(plan).update(
        _decode_fields(text, "properties", decoder, _PROPERTIES),
        mesh=mesh,
        captured=captured,
        boundary=boundary,
        request=_request(text, decoder, captured, mesh),
        seconds={},
        counts={},
        _layouts=None,
        _local=program,
        _later={
            "sharded": lambda: later("sharded"),
            "program": lambda: fx.GraphModule(constants, later("program")),
        },
    )
    return plan


def _constants(text: dict[str, object], decoder: Decoder) -> nn.Module:
    """Return the module with a text's constants.

    A row has dtype, shape, bytes in base64, and type of device.
    """
    constants = nn.Module()
    rows = typed(text, "constants", dict, "a table of constants")
    for name, row in rows.items():
        identifier([*rows], [*rows].index(name))
        try:
            dtype, shape, content = decoder.decode(row[0]), [*map(natural, row[1])], row[2]
            values = base64.b64decode(content, validate=True)
            if len(row) != 4 or len(values) != math.prod(shape) * dtype.itemsize:
                raise ValueError(shape)
            # A bool with another byte than 0 or 1 is undefined for torch's kernels.
            if dtype is torch.bool and values.strip(b"\0\1"):
                raise ValueError(dtype)
            # torch.frombuffer refuses an empty buffer.
            tensor = torch.frombuffer(bytearray(values), dtype=dtype) if values else torch.empty(0)
            constants.register_buffer(name, on_device(tensor.to(dtype).view(shape), row[3]))
        except REFUSALS as error:
            raise Malformed(rows, name, "dtype, shape, bytes, device of a constant") from error
    return constants


def device_type(constant: Tensor) -> str:
    """Return the type of a constant's device: each process has a device of it, of another index."""
    return constant.device.type


def on_device(constant: Tensor, kind: str) -> Tensor:
    """Return a constant on the current device of a type; on the CPU if there is none of it."""
    if kind not in DEVICES:
        raise ValueError(kind)
    is_there = kind != "cpu" and torch.accelerator.is_available()
    return constant.to(torch.accelerator.current_accelerator()) if is_there else constant


def _fields(text: dict[str, object], decoder: Decoder) -> dict[str, Any]:
    """Return the captured program's fields, with the types that Captured declares."""
    fields = _decode_fields(text, "captured", decoder, FIELDS)
    hints = field_types(Captured)
    for name, value in fields.items():
        lacks = value is None and text.get("lacks") and name not in NEEDED
        if not lacks and not conforms(value, hints[name]):
            raise Malformed(text["captured"], name, f"{hints[name]}")
    return fields


def _decode_fields(
    text: dict[str, object], part: str, decoder: Decoder, names: Iterable[str]
) -> dict[str, Any]:
    table = typed(text, part, dict, "a table of fields")
    if table.keys() != {*names}:
        raise Malformed(text, part, f"the fields {', '.join(names)}")
    return {name: decoder.decode(value) for name, value in table.items()}


def _request(
    text: dict[str, object], decoder: Decoder, captured: Captured, mesh: Mesh
) -> Request | None:
    """Return a plan's request, if it can be planned again."""
    if text.get("request") is None:
        return None
    options, hints = _decode_fields(text, "request", decoder, REQUEST), field_types(Request)
    for name, value in options.items():
        if not conforms(value, hints[name]):
            raise Malformed(text["request"], name, f"{hints[name]}")
    return Request(captured, mesh, **options)


def _boundary(text: dict[str, object], decoder: Decoder) -> Boundary:
    """Return the layouts for inputs and results."""
    rows, hints = typed(text, "boundary", list, "layouts"), field_types(Boundary)
    values = [*map(decoder.decode, rows)]
    if len(values) != len(hints) or not all(map(conforms, values, hints.values())):
        raise Malformed(text, "boundary", "layouts of inputs and results, and shapes of these")
    return Boundary(*values)


def constants_of(
    captured: Captured, program: fx.Graph, largest: int
) -> Iterator[tuple[str, list[Any]]]:
    """Yield name and values for a program's constants, each with at most `largest` elements."""
    encoder, owner = Encoder(), captured.constants
    graphs: Iterable[fx.Graph] = (captured.graph, program)
    for name in dict.fromkeys(str(n.target) for g in graphs for n in g.nodes if n.op == "get_attr"):
        value = getattr(owner, name)
        if not isinstance(value, Tensor) or type(value) not in (Tensor, nn.Parameter):
            raise Unshareable(f"its constant {name} is a {type(value).__qualname__}")
        # A large constant would dominate the text, which all ranks get by broadcast.
        if value.numel() > largest or value.is_meta or value.requires_grad:
            raise Unshareable(f"its constant {name} is large, or has no values")
        if value.is_complex() or value.is_quantized or value.layout is not torch.strided:
            raise Unshareable(f"its constant {name} is {value.dtype}")
        encoded = base64.b64encode(bytes_of(value)).decode()
        yield name, [encoder.encode(value.dtype), list(value.shape), encoded, device_type(value)]


def tensors_of(model: nn.Module, inputs: tuple[Input, ...]) -> list[Tensor]:
    """Return the model's parameters and buffers that a program takes as inputs."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = [each.name for each in inputs if each.kind in (PARAMETER, BUFFER)]
    if names != list(state):
        raise Stale("the model has other parameters or buffers")
    return [state[name] for name in names]
