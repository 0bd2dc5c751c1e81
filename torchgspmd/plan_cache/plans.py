"""A plan as JSON, and back to a plan of this process's model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, fx, nn

from ..capture import BUFFER, PARAMETER, Captured, Input
from ..capture.state.bytecode_names import dotted_names, imports_own_modules, is_installed
from ..capture.state.guards import Guards
from ..fx_passes.replication_report import ReplicatedOp
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


class Planned(Protocol):
    """What of a Plan is in its text."""

    captured: Captured
    sharded: fx.Graph
    program: fx.GraphModule

    @property
    def replicated_ops(self) -> tuple[ReplicatedOp, ...]: ...


P = TypeVar("P")


def encode_plan(plan: Planned, model: nn.Module) -> dict[str, Any]:
    """Return a plan as JSON.

    Raises:
        Unshareable: Its program depends on what has no text.
    """
    captured, encoder = plan.captured, Encoder()
    _check_functions(captured)
    guards = GuardEncoder(model, captured.reads).encode()
    fields = {name: encoder.encode(getattr(captured, name)) for name in FIELDS}
    constants = dict(constants_of(captured, plan.program.graph, LARGEST))
    return {"guards": guards, "constants": constants, **encode_graphs(plan, fields, encoder)}


def encode_graphs(planned: Planned, fields: dict[str, Any], encoder: Encoder) -> dict[str, Any]:
    """Return the graphs of a plan as JSON, with encoded fields of its Captured."""
    body = {
        "captured": fields,
        "source": encode_graph(planned.captured.graph, encoder),
        "sharded": encode_graph(planned.sharded, encoder),
        "program": encode_graph(planned.program.graph, encoder),
        "replicated": encoder.encode(planned.replicated_ops),
    }
    return {"records": encoder.records, **body}


def decode_plan(
    text: dict[str, Any], model: nn.Module, mesh: Mesh, plan_class: Callable[..., P]
) -> P:
    """Return the plan of a text for the model.

    Raises:
        Stale: The model, or what its forward reads, is another.
    """
    guards = GuardDecoder(model).decode(text["guards"])
    return decode_graphs(text, mesh, plan_class, lambda inputs: tensors_of(inputs, model), guards)


def decode_graphs(
    text: dict[str, Any],
    mesh: Mesh,
    plan_class: Callable[..., P],
    tensors: Callable[[tuple[Input, ...]], list[Tensor]],
    guards: Guards,
) -> P:
    """Return the plan of a text. tensors: those of parameters and buffers, by the inputs."""
    decoder, constants = Decoder(text["records"]), nn.Module()
    for name, (dtype, shape, numbers) in text["constants"].items():
        values = torch.tensor(numbers, dtype=decoder.decode(dtype)).view(shape)
        constants.register_buffer(name, values)
    sharded = decode_graph(text["sharded"], decoder)
    program = decode_graph(text["program"], decoder)
    fields = {name: decoder.decode(value) for name, value in text["captured"].items()}
    captured = Captured(
        graph=decode_graph(text["source"], decoder),
        constants=constants,
        tensors=tensors(fields["inputs"]),
        reads=guards,
        **fields,
    )
    plan = plan_class(mesh, captured, sharded, fx.GraphModule(constants, program), None, {})
    plan.__dict__["replicated_ops"] = decoder.decode(text["replicated"])
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
