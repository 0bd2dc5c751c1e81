"""A plan as JSON, and back to a plan of this process's model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from ..capture import BUFFER, PARAMETER, Captured, Input
from ..capture.state.bytecode_names import dotted_names, imports_own_modules, is_installed
from ..capture.state.guards import Guards
from ..fx_passes.program import Boundary
from ..fx_passes.runnable_plan import RunnablePlan
from ..mesh import Mesh
from .graphs import decode_graph, encode_graph
from .guards import GuardDecoder, GuardEncoder
from .values import Decoder, Encoder, Stale, Unshareable

LARGEST = 1 << 14  # elements of a constant in a text
# Names by which a function reads what no guard compares.
_UNSEEN = {"environ", "getenv", "get_rank", "get_local_rank", "get_node_local_rank", "urandom"}
_UNSEEN_MODULES = {"random", "time", "secrets", "uuid", "datetime"}
_BY_HAND = {"graph", "constants", "tensors", "reads", "functions"}
FIELDS = sorted({f.name for f in dataclasses.fields(Captured)} - _BY_HAND)
_PROPERTIES = ("replicated_ops", "is_dynamic", "draws")
_LATER = ("sharded", "source")  # graphs that nobody runs: each is a line of JSON


P = TypeVar("P")


class Later:
    """An object with attributes that are computed when they are read first."""

    _later: Mapping[str, Callable[[], Any]] = MappingProxyType({})

    def __getattr__(self, name: str) -> Any:
        if name not in self._later:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        value = vars(self)[name] = self._later[name]()
        return value

    def decode_all(self) -> None:
        """Compute the attributes now."""
        for name in self._later:
            getattr(self, name)


class _CapturedOfText(Later, Captured):
    """A captured program whose graph is decoded later."""

    def kept_tensors(self, owners: Mapping[int, str]) -> list[tuple[str, Tensor]]:
        """Return the constant tensors of the graph, which is not asked if there are none."""
        has_constants = next(self.constants.buffers(), None) is not None
        return super().kept_tensors(owners) if has_constants else []


def encode_plan(plan: RunnablePlan, model: nn.Module) -> str:
    """Return a plan as text: three lines of JSON.

    Raises:
        Unshareable: Its program depends on what has no text.
    """
    captured, encoder = plan.captured, Encoder()
    _check_functions(captured)
    guards = GuardEncoder(model, captured.reads).encode()
    fields = {name: encoder.encode(getattr(captured, name)) for name in FIELDS}
    constants = dict(constants_of(captured, plan.program_graph, LARGEST))
    text = {"guards": guards, "constants": constants, **encode_graphs(plan, fields, encoder)}
    later = [text.pop(name) for name in _LATER]
    return "\n".join(map(json.dumps, (text, *later)))


def encode_graphs(
    planned: RunnablePlan, fields: dict[str, Any], encoder: Encoder
) -> dict[str, Any]:
    """Return the graphs of a plan as JSON, with encoded fields of its Captured."""
    body = {
        "captured": fields,
        "source": encode_graph(planned.captured.graph, encoder),
        "sharded": encode_graph(planned.sharded, encoder),
        "program": encode_graph(planned.program_graph, encoder),
        "boundary": [encoder.encode(x) for x in vars(planned.boundary).values()],
        "properties": {name: encoder.encode(getattr(planned, name)) for name in _PROPERTIES},
    }
    return {"records": encoder.records, **body}


def decode_plan(text: str, model: nn.Module, mesh: Mesh, plan_class: type[P]) -> P:
    """Return the plan of a text for the model.

    Raises:
        Stale: The model, or what its forward reads, is another.
    """
    first, *later = text.split("\n")
    rows = json.loads(first)
    guards = GuardDecoder(model).decode(rows["guards"])
    rows |= zip(_LATER, later, strict=True)
    return decode_graphs(rows, mesh, plan_class, lambda inputs: tensors_of(inputs, model), guards)


def decode_graphs(
    text: dict[str, Any],
    mesh: Mesh,
    plan_class: type[P],
    tensors: Callable[[tuple[Input, ...]], list[Tensor]],
    guards: Guards,
) -> P:
    """Return the plan of a text, whose graphs are decoded later, but for the one that runs.

    tensors: those of parameters and buffers, by the inputs.
    """
    decoder, constants = Decoder(text["records"]), nn.Module()
    for name, (dtype, shape, numbers) in text["constants"].items():
        values = torch.tensor(numbers, dtype=decoder.decode(dtype)).view(shape)
        constants.register_buffer(name, values)

    def graph(name: str) -> fx.Graph:
        rows = text[name]
        return decode_graph(json.loads(rows) if isinstance(rows, str) else rows, decoder)

    fields = {name: decoder.decode(value) for name, value in text["captured"].items()}
    captured = _CapturedOfText.__new__(_CapturedOfText)
    vars(captured).update(
        fields,
        constants=constants,
        tensors=tensors(fields["inputs"]),
        reads=guards,
        _later={"graph": lambda: graph("source")},
    )
    plan = plan_class.__new__(plan_class)
    vars(plan).update(
        {name: decoder.decode(value) for name, value in text["properties"].items()},
        mesh=mesh,
        captured=captured,
        boundary=Boundary(*map(decoder.decode, text["boundary"])),
        seconds={},
        counts={},
        _layouts=None,
        _local=graph("program"),
        _later={
            "sharded": lambda: graph("sharded"),
            "program": lambda: fx.GraphModule(constants, graph("program")),
        },
    )
    return plan


def _check_functions(captured: Captured) -> None:
    """Raise Unshareable if a function may read what differs between processes unseen."""
    for function in captured.functions:
        if is_installed(function.__module__):
            continue
        if imports_own_modules(function.__code__):
            raise Unshareable(f"{function.__qualname__} imports")
        for names in dotted_names(function.__code__):
            if not _UNSEEN.isdisjoint(names) or not _UNSEEN_MODULES.isdisjoint(names[:-1]):
                raise Unshareable(f"{function.__qualname__} names {'.'.join(names)}")


def constants_of(
    captured: Captured, program: fx.Graph, largest: int
) -> Iterator[tuple[str, list[Any]]]:
    """Yield name and values of the constants of a program, of so many elements at most."""
    encoder, owner = Encoder(), captured.constants
    graphs: Iterable[fx.Graph] = (captured.graph, program)
    for name in dict.fromkeys(str(n.target) for g in graphs for n in g.nodes if n.op == "get_attr"):
        value = getattr(owner, name)
        if not isinstance(value, Tensor) or type(value) not in (Tensor, nn.Parameter):
            raise Unshareable(f"its constant {name} is a {type(value).__qualname__}")
        if value.numel() > largest or value.device.type != "cpu" or value.requires_grad:
            raise Unshareable(f"its constant {name} is large, or not on the CPU")
        if value.is_complex() or value.is_quantized or value.layout is not torch.strided:
            raise Unshareable(f"its constant {name} is {value.dtype}")
        yield name, [encoder.encode(value.dtype), list(value.shape), value.flatten().tolist()]


def tensors_of(inputs: tuple[Input, ...], model: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of the model that are inputs of a program."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = [each.name for each in inputs if each.kind in (PARAMETER, BUFFER)]
    if names != list(state):
        raise Stale("the model has other parameters or buffers")
    return [state[name] for name in names]
