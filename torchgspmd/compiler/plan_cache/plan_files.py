"""Plan.save and Plan.load: a plan as a file, to look at, to compare, and to simulate."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn

from ...capture import BUFFER, PARAMETER, Input
from ...capture.state.guards import Guards
from ...capture.trace_context import without_gc
from ...comm.json_rows import conforms
from ...errors import ShardingError
from ...fx_passes import Layouts
from ...fx_passes.program import Request, RunnablePlan
from ...layout.mesh import Mesh
from ...shard_spec import ShardSpec
from . import json_text
from .decoder import REFUSALS, Decoder, typed
from .graph_codec import encode_graph, identifier
from .guard_text import encode_run_guards, place_run_guards
from .json_text import Malformed, Stale, Unshareable, read_regular_file
from .plans import FIELDS, NEEDED, Later, constants_of, decode_graphs, encode_graphs, tensors_of
from .signature import check_source, signature_of
from .values import Encoder

_FORMAT = 8
_LARGEST = 1 << 20  # elements of a constant in a file
_MOST_DEVICES = 1 << 20
_VERSION = re.compile(rb'\{"format": (\d{1,9})[,}]')
_HEAD = re.compile(rb'\{"format": \d+, "sha256": "([0-9a-f]{64})", ')
_KEYS = {
    *"mesh lacks guards seconds counts signature constants records captured source sharded".split(),
    *"program boundary request properties reasons".split(),
}
_PLAIN = (
    ("lacks", str | None, "why it cannot be simulated, or null"),
    ("guards", dict[str, Any] | None, "what a run is compared with, or null"),
    ("seconds", dict[str, float], "seconds by pass"),
    ("counts", dict[str, int], "work of the searches by name"),
)
_DERIVED = ("boundary", "is_dynamic", "draws")  # from the graphs

P = TypeVar("P", bound="PlanFiles")


class PlanFiles(Later, RunnablePlan):
    """Plan methods that write and read files. _lacks: why a plan cannot be simulated."""

    mesh: Mesh
    captured: Any
    seconds: dict[str, float]
    counts: dict[str, int]
    _layouts: Layouts | None
    _lacks: str | None = None
    _is_checked: bool = True  # False for a plan of a file, until its source was planned again
    _plan_again: Callable[[Request], PlanFiles]  # api.py has it

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file, which `Plan.load` reads.

        It has the graphs, the layouts and their reasons, but no parameter values.

        Args:
            path: The file.

        Raises:
            ShardingError: The program calls a function without a name, or has large constants.

        Example:
            >>> import os, tempfile
            >>> x, w = torch.ones(4, 8), torch.ones(8, 16)
            >>> specs = ("data model", "model _")
            >>> result = plan(torch.matmul, x, w, mesh=Mesh(data=2, model=4), in_specs=specs)
            >>> path = os.path.join(tempfile.mkdtemp(), "plan.json")
            >>> result.save(path)
            >>> str(Plan.load(path)) == str(result)
            True
        """
        try:
            text = self._text()
        except Unshareable as error:
            raise ShardingError.here(
                "this plan cannot be written to a file",
                why=str(error),
                fix="register large tensors as buffers; name operations by torch.library",
            ) from error
        Path(path).write_bytes(with_checksum(text.encode()))

    def _text(self) -> str:
        encoder, lacks = Encoder(), self._lacks
        fields: dict[str, Any] = {}
        for name in FIELDS:
            try:
                fields[name] = encoder.encode(getattr(self.captured, name))
            # A plan without these fields can still be looked at: it lacks them, and says why.
            except Unshareable as error:
                if name in NEEDED:
                    raise
                fields[name], lacks = None, lacks or str(error)
        guards = None
        try:
            guards = encode_run_guards(self.captured)
        except Unshareable as error:
            lacks = lacks or str(error)
        text = {
            "mesh": str(self.mesh),
            "lacks": lacks,
            "guards": guards,
            "seconds": self.seconds,
            "counts": self.counts,
            "signature": signature_of(self.captured),
            "constants": dict(constants_of(self.captured, self.program_graph, _LARGEST)),
            **encode_graphs(self, fields, encoder),
            "reasons": self._layouts and list(_reasons(self._layouts, encoder)),
        }
        return json_text.dump(text)

    @classmethod
    @without_gc()
    def load(cls: type[P], path: str | Path, model: nn.Module | None = None) -> P:
        """Read a plan that `save` has written. Nothing in the file is evaluated.

        Args:
            path: The file.
            model: The module with the parameters for `simulate`. Without it a module's plan
                cannot be simulated. Its modules, modes, and the attributes that its forward
                reads have to be the plan's.

        Returns:
            The plan: print it, report, estimate, compare, explain it (without costs).

        Raises:
            ShardingError: It is no such file, or has another version or another model.

        Example:
            >>> import os, tempfile
            >>> model, x = torch.nn.Linear(8, 8), torch.ones(4, 8)
            >>> path = os.path.join(tempfile.mkdtemp(), "plan.json")
            >>> plan(model, x, mesh=Mesh(data=2), in_specs=("data _",)).save(path)
            >>> Plan.load(path, model).simulate(x).allclose(model(x))
            True
        """
        try:
            text = _verified(read_regular_file(path)[0])
            try:
                return _plan_of(text, cls, model)
            except Malformed as fault:
                raise fault.located(text) from None
        except FileNotFoundError as error:
            raise ShardingError.here(
                f"there is no file {path}", fix="write it by plan.save(path), or correct the path"
            ) from error
        except (Stale, OSError, *REFUSALS) as error:
            raise ShardingError.here(
                f"{path} is no plan for this program",
                why=str(error) or type(error).__name__,
                fix="plan it again, and save it",
            ) from error

    def check_complete(self) -> None:
        """Raise ShardingError if the plan was read from a file that does not suffice to run it.

        The file's program has to be the one that its source is planned to.
        """
        if self._lacks:
            raise ShardingError.here(
                "this plan was read from a file, and cannot be simulated",
                why=self._lacks,
                fix="call torchgspmd.plan() with the model",
            )
        # At the first run only: it costs as much as planning, and printing needs no such proof.
        if not self._is_checked:
            self._check_source()
            self._is_checked = True

    def _check_source(self) -> None:
        """Raise ShardingError unless planning the source gives the file's graphs."""
        try:
            again = self._plan_again(cast(Request, self.request))
            parts = ("sharded", "program_graph")
            differing = [p for p in parts if _rows(getattr(self, p)) != _rows(getattr(again, p))]
            differing += [p for p in _DERIVED if getattr(self, p) != getattr(again, p)]
            why = f"its source is planned to another {differing[0]}" if differing else None
        except Exception as error:  # a source that nobody captured may break any pass
            why = f"its source cannot be planned: {error}"
        if why:
            raise ShardingError.here(
                "this plan was read from a file whose program is not that of its source",
                why=f"{why}; another version has saved it, or somebody changed it",
                fix="plan it again, and save it",
            )


def with_checksum(text: bytes) -> bytes:
    """Return a file's content: JSON whose first keys are the format and a checksum.

    The checksum covers all behind it, and is compared before any part is parsed.
    """
    body = text[1:]
    checksum = hashlib.sha256(body).hexdigest()
    return f'{{"format": {_FORMAT}, "sha256": "{checksum}", '.encode() + body


def _verified(content: bytes) -> dict[str, Any]:
    """Return the JSON in a file with this format, once its checksum fits."""
    if (version := _VERSION.match(content)) is None:
        raise Stale("it does not begin as a plan: 'format' is its first key")
    # Before the checksum: an older format may have none, and its error should name the version.
    if int(version[1]) != _FORMAT:
        raise Stale(f"its format is {int(version[1])}, that of this version {_FORMAT}")
    if (head := _HEAD.match(content)) is None:
        raise Stale("it has no checksum: 'sha256' is the second key of a plan")
    if hashlib.sha256(content[head.end() :]).hexdigest().encode() != head[1]:
        raise Stale("its content has another checksum: it was changed, or is not whole")
    return typed(json_text.load(b"{" + content[head.end() :]), None, dict, "a plan")


def _plan_of(text: dict[str, Any], cls: type[P], model: nn.Module | None) -> P:
    """Build the plan from a file's JSON."""
    # Unknown keys are refused as well: nothing would check their content.
    if text.keys() != _KEYS:
        key = min(text.keys() ^ _KEYS)
        raise Malformed(text, key, "a key of a plan" if key in text else f"the key {key}")
    mesh = Mesh.parse(typed(text, "mesh", str, "a mesh such as data=2,model=4"))
    if mesh.size > _MOST_DEVICES:
        raise Malformed(text, "mesh", f"a mesh of at most {_MOST_DEVICES} devices")
    for name, hint, expected in _PLAIN:
        if not conforms(text[name], hint):
            raise Malformed(text, name, expected)
    decoder = Decoder(text["records"], mesh)
    plan = decode_graphs(text, decoder, cls, partial(_tensors, model), Guards())
    program = plan.program_graph = vars(plan).pop("_local")
    run = partial(fx.GraphModule, plan.captured.constants, program)
    plan._later = {**plan._later, "program": run}
    check_source(plan.captured, plan.sharded)
    # The signature is for readers: it has to say the same as the decoded parts.
    if signature_of(plan.captured) != text["signature"]:
        raise Malformed(text, "signature", "that of the plan")
    plan.seconds, plan.counts, plan._lacks = text["seconds"], text["counts"], text["lacks"]
    if text["guards"] is not None and plan.captured.leaves is not None:
        place_run_guards(text["guards"], plan.captured, model)
    if text["reasons"] is not None:
        plan._layouts = _layouts(text, decoder)
    if model is None and any(i.kind in (PARAMETER, BUFFER) for i in plan.captured.inputs):
        plan._lacks = plan._lacks or "it has no parameters: Plan.load(path, model)"
    if plan.request is None:
        plan._lacks = plan._lacks or "it does not say how it was planned, as by with_pass"
    plan._is_checked = False
    # Views are tried now: an error in print(plan) would come far from the damaged file.
    _view(plan)
    return plan


def _view(plan: Any) -> None:
    """Raise Stale unless every view on a plan works, so that none raises later."""
    try:
        plan.text(full=True)
        plan.trace()
        report = plan.report()
        if plan._layouts is not None:
            plan._page("", report)
    except Exception as error:  # the views take the graphs of a plan as the passes leave them
        raise Stale(f"it cannot be printed: {type(error).__name__}: {error}") from error


def _rows(graph: fx.Graph) -> tuple[Any, Any]:
    """Return a graph as JSON, with its own records."""
    # A fresh encoder: record numbers depend on what was encoded before.
    encoder = Encoder()
    return encode_graph(graph, encoder), encoder.records


def _tensors(model: nn.Module | None, inputs: tuple[Input, ...]) -> list[Tensor]:
    """Return the model's parameters and buffers; on meta without one."""
    if model is not None:
        return tensors_of(model, inputs)
    state = [i for i in inputs if i.kind in (PARAMETER, BUFFER)]
    return [torch.empty(i.shape, dtype=i.dtype, device="meta") for i in state]


def _reasons(layouts: Layouts, encoder: Encoder) -> Iterator[list[Any]]:
    """Yield a row for every value: name, layout, and for each axis where it came from, and why."""
    for node, spec in layouts.spec.items():
        origins = [
            [axis, before and before.name, why]
            for axis in spec.sharding_axes
            for before, why in [layouts.origin.get((node, axis), (None, None))]
            if why is not None
        ]
        yield [node.name, encoder.encode(spec), origins]


def _layouts(text: dict[str, Any], decoder: Decoder) -> Layouts:
    """Return a file's layouts, for values that have nothing but names."""
    rows = typed(text, "reasons", list, "a row for each value")
    graph, layouts = fx.Graph(), Layouts(decoder.mesh, {}, {})
    nodes: dict[str, fx.Node] = {}
    for row in rows:
        if not conforms(row, list) or len(row) != 3 or type(row[2]) is not list:
            raise Malformed(row, None, "name, layout and reasons of a value")
        name, spec = identifier(row, 0), decoder.decode(row[1])
        if name in nodes or not isinstance(spec, ShardSpec):
            raise Malformed(row, 1, "the one layout of a value")
        node = nodes[name] = graph.placeholder(name)
        node.name, layouts.spec[node] = name, spec
    # In a second round: an origin may be a value in a later row.
    for name, _, origins in rows:
        for row in origins:
            if not conforms(tuple(row), tuple[str, str | None, str]) or row[1] not in {
                *nodes,
                None,
            }:
                raise Malformed(origins, None, "an axis, a value it came from, and why")
            axis, before, why = row
            layouts.origin[nodes[name], axis] = before and nodes[before], why
    _check_chains(layouts, rows)
    return layouts


def _check_chains(layouts: Layouts, rows: list[Any]) -> None:
    """Raise Malformed if an axis's reasons go round in a circle."""
    ending: set[tuple[fx.Node, str]] = set()
    for value, axis in layouts.origin:
        chain: dict[tuple[fx.Node, str], None] = {}
        at: fx.Node | None = value
        # `ending` has the links known to end, so that every link is followed once.
        while at is not None and (at, axis) not in ending:
            if (at, axis) in chain:
                raise Malformed(rows, None, f"reasons for {axis} of %{value} that end at a mark")
            chain[at, axis] = None
            at = layouts.origin.get((at, axis), (None, ""))[0]
        ending.update(chain)
