"""Audit: values that ranks have in common, compared every few calls by one small message.

    a parameter, buffer or optimizer state   ranks that differ only along axes which do not shard
                                             it have equal bits
    its gradient of the call before          they have nearly equal norms
    the loss of the call before              all ranks have nearly the same
    a parameter that is trained              it has no NaN

A rank's words are sums of hashes, one per set of sharding axes: as many words as the mesh has such
sets. Which tensor and which rank differs is asked only when words do.

On the CPU values are read before the forward, and the ranks meet behind it. A GPU's values are read
behind the forward, and the ranks meet at the next call, so that no rank waits for its kernels.
"""

from __future__ import annotations

import math
import socket
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..capture import PARAMETER
from ..capture.state.dependencies import named_tensors
from ..comm.process_groups import ProcessGroups
from ..comm.rank_check import RankCheck, all_gather_rows
from ..comm.rank_failure import listed
from ..comm.value_check import bits_of, double_of, hash_of_bits, signed
from ..compat.operators import aten
from ..compat.private_apis import _pytree as pytree
from ..dtensor.storage import local_of, spec_of
from ..errors import RankError, user_line
from ..layout.mesh import Mesh
from .joint_program import JointProgram
from .mesh_module import ModuleCall

SHOWN = 3  # how many names an error lists besides the first
CHUNKS = 1024  # tensor parts whose hashes tell where it differs
_ODD = 0x1E3779B97F4A7C15
_HEAD, _HELD = 2, 2  # words before the sets' own: how many items, NaN; words per set


class Item(NamedTuple):
    """A value that ranks hold in common. axes: those that shard it, as bits.

    value: a hash over its bits, or a double that may differ by rounding; `tolerance` says which.
    """

    name: str
    axes: int
    tensor: Tensor
    value: Tensor
    tolerance: float = 0.0  # relative; 0 for a hash

    @property
    def kind(self) -> int:
        """Its word within its axis set: 0 for hashes, 1 for doubles."""
        return int(self.tolerance > 0)


class Reading:
    """One audit's values: read, sent, compared."""

    def __init__(
        self,
        groups: ProcessGroups,
        items: list[Item],
        nans: Mapping[str, Tensor],
        call: int,
        every: int,
    ) -> None:
        """Begin to read. nans: for each parameter name, whether its shard has a NaN."""
        self.groups, self.items, self.names, self.call = groups, items, [*nans], call
        self.every, self.axes = every, axes_of(groups.mesh)
        self.where = user_line()
        values = (item.value for item in items)
        # A double by its bits.
        read = [v.view(torch.int64) if v.dtype == torch.float64 else v for v in values] + [
            *nans.values()
        ]
        by_device: dict[torch.device, list[int]] = {}
        for i, value in enumerate(read):
            by_device.setdefault(value.device, []).append(i)
        self.arrived: list[tuple[list[int], Tensor, Any]] = []
        for device, indices in by_device.items():
            values = torch.stack([read[i] for i in indices])
            # Copied without a wait: the values are read at the next call.
            event = torch.cuda.Event() if device.type == "cuda" else None
            values = values.to("cpu", non_blocking=event is not None)
            if event is not None:
                event.record(torch.cuda.current_stream(device))
            self.arrived.append((indices, values, event))

    def read(self) -> None:
        """Wait for this rank's values."""
        self.values = [0] * (len(self.items) + len(self.names))
        for indices, values, event in self.arrived:
            if event is not None:
                event.synchronize()
            for i, value in zip(indices, values.tolist()):
                self.values[i] = value

    def _words(self) -> list[int]:
        """Return a sum for each axis set and kind, behind the number of all items."""
        sums = [0] * (_HELD << len(self.axes))
        doubles = [0.0] * len(sums)
        for i, (item, value) in enumerate(zip(self.items, self.values)):
            place = _HELD * item.axes + item.kind
            if item.kind:
                doubles[place] += double_of(value)
            else:
                # An odd factor per item: two items that are swapped, or differ oppositely, change
                # the sum.
                sums[place] += value * (2 * i + 1) * _ODD
        held = [bits_of(doubles[i]) if i % _HELD else signed(total) for i, total in enumerate(sums)]
        flags = self.values[len(self.items) :]
        first = flags.index(1) + 1 if any(flags) else 0
        return [len(self.items), first, *held]

    def finish(self) -> None:
        """Wait for all ranks' words and compare them."""
        groups = self.groups
        rows = all_gather_rows(groups, self._words(), "the audit of the module")
        if len({row[0] for row in rows}) > 1:
            raise RankError(
                f"the ranks hold different numbers of tensors: {[row[0] for row in rows]}",
                where=self.where,
                why="an audit compares parameters, buffers and optimizer states",
                fix="make the same optimizers on every rank",
            )
        for place in range(_HEAD, len(rows[0])):
            axes, kind = divmod(place - _HEAD, _HELD)
            for ranks in replicas(groups.mesh, self.axes, axes):
                column = [rows[rank][place] for rank in ranks]
                tolerance = max((i.tolerance for i in self.items if i.axes == axes), default=0.0)
                if _differ(column, tolerance if kind else 0.0):
                    self._raise_difference()
        for rank, row in enumerate(rows):
            if row[1]:
                raise RankError(
                    f"'{self.names[row[1] - 1]}' has NaN on rank {rank}",
                    where=self.where,
                    why=f"audit of call {self.call}: an update of the last {self.every} calls, or "
                    "the memory of a rank, made it",
                    fix="start anew from a checkpoint before call "
                    f"{max(self.call - self.every, 0)}; torch.autograd.detect_anomaly() names the "
                    "operation if it comes again",
                )

    def _raise_difference(self) -> None:
        """Ask all ranks for each item's values, and raise the error that names the first."""
        groups = self.groups
        rows = all_gather_rows(groups, self.values)
        # Hashes first: a flipped bit in a weight is the cause of a gradient that differs.
        order = sorted(range(len(self.items)), key=lambda i: self.items[i].kind)
        found = list[tuple[Item, dict[int, int]]]()
        for i in order:
            item = self.items[i]
            for ranks in replicas(groups.mesh, self.axes, item.axes):
                column = [rows[rank][i] for rank in ranks]
                if _differ(column, item.tolerance):
                    found.append((item, dict(zip(ranks, column))))
                    break
        if found:
            raise self._error(*found[0], [item.name for item, _ in found[1:]])

    def _error(self, item: Item, found: Mapping[int, int], others: Sequence[str]) -> RankError:
        """Return the error for an item. found: its value on each rank that holds it in common.

        others: names whose values differ, too.
        """
        groups, call, every = self.groups, self.call, self.every
        ordered = Counter(found.values()).most_common()
        # The value that most ranks hold is taken for right.
        wrong = [rank for rank, value in found.items() if value != ordered[0][0]]
        right = [rank for rank, value in found.items() if value == ordered[0][0]]
        hosts = all_gather_rows(groups, socket.gethostname())
        notes = [f"audit of call {call}: these ranks hold one value, and did at {call - every}"]
        if item.kind:
            numbers = ", ".join(f"{double_of(v):.9g} on rank {rank}" for rank, v in found.items())
            what = f"{item.name} differs between ranks: {numbers}"
        else:
            what = f"'{item.name}' has other bits on {listed(wrong)} than on {listed(right)}"
            notes.append(_first_difference(groups, item, wrong[0], right[0]))
        if len(ordered) > 1 and ordered[0][1] == ordered[1][1]:
            notes.append("as many ranks have the one as the other, so either may be right")
        if others:
            more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
            notes.append(f"so do {', '.join(others[:SHOWN])}{more}")
        return RankError(
            what,
            where=self.where,
            why="; ".join(notes),
            fix=f"start anew from a checkpoint before call {call - every + 1}, and test the memory "
            f"of {', '.join(dict.fromkeys(str(hosts[rank]) for rank in wrong))}; if it comes "
            "again, look for code that runs on one rank alone",
        )


def _first_difference(groups: ProcessGroups, item: Item, wrong: int, right: int) -> str:
    """Return where a tensor differs between two ranks, with both numbers; every rank calls it."""
    flat = item.tensor.detach().reshape(-1)
    size = -(-flat.numel() // CHUNKS)
    hashes = all_gather_rows(groups, [int(hash_of_bits(part)) for part in flat.split(size)])
    pairs = enumerate(zip(hashes[wrong], hashes[right]))
    # Two rounds: 1,024 hashes, then one part, in place of the whole tensor.
    chunk = next((i for i, (one, other) in pairs if one != other), None)
    if chunk is None:
        return "it has equal bits again"
    part = flat[chunk * size : (chunk + 1) * size]
    rows = all_gather_rows(groups, [repr(x) for x in part.tolist()])
    pairs = enumerate(zip(rows[wrong], rows[right]))
    found = next(((i, one, other) for i, (one, other) in pairs if one != other), None)
    if found is None:
        return "it has other bits of the same number"
    index, one, other = found
    at = chunk * size + index
    place = [*map(int, torch.unravel_index(torch.tensor(at), item.tensor.shape))]
    of = " of its shard" if item.axes else ""
    return f"element {place}{of} is {one} on rank {wrong} and {other} on rank {right}"


def axes_of(mesh: Mesh) -> list[str]:
    """Return the axes with more than one device, in the bit order of `Item.axes`."""
    return [name for name, size in mesh.axes if size > 1]


def replicas(mesh: Mesh, axes: Sequence[str], sharding: int) -> list[list[int]]:
    """Return the rank groups that hold one value. sharding: the axes that shard it, as bits."""
    groups: dict[tuple, list[int]] = {}
    for rank in range(mesh.size):
        coordinates = mesh.coordinates(rank)
        key = tuple(coordinates[a] for i, a in enumerate(axes) if sharding >> i & 1)
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def _differ(column: Sequence[int], tolerance: float) -> bool:
    """Whether ranks' words differ: hashes at all, doubles by more than rounding."""
    if not tolerance:
        return len({*column}) > 1
    numbers = [*map(double_of, column)]
    # NaN on all ranks is alike: a loss may be NaN for a reason of the model.
    if any(map(math.isnan, numbers)):
        return not all(map(math.isnan, numbers))
    return max(numbers) - min(numbers) > tolerance * max(map(abs, numbers))


_LOSS = "the loss"
_LARGEST_LOSS = 16  # elements of a result that may be a loss


class Audit:
    """One module's comparisons on a mesh. every: calls from one to the next."""

    def __init__(self, model: nn.Module, groups: ProcessGroups, every: int) -> None:
        self.model, self.groups, self.every, self.calls = model, groups, every, 0
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.axes = axes_of(groups.mesh)
        self._loss: list[Tensor] = []
        self._norms: tuple[list[str], Tensor | None] = [], None
        self._reading: Reading | None = None
        # Weak: the hook is global, and would keep the module alive.
        own = weakref.ref(self)

        def stepped(optimizer: Optimizer, *_: object) -> None:
            trained = [p for group in optimizer.param_groups for p in group["params"][:1]][:1]
            if (audit := own()) is not None and any(
                p is one for p in audit.model.parameters() for one in trained
            ):
                audit.optimizers.add(optimizer)

        # An optimizer is found when it steps: nothing else says which ones train this module.
        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def of_copy(self, model: nn.Module) -> Audit:
        return Audit(model, self.groups, self.every)

    def run(self, program: JointProgram, call: ModuleCall, rank_check: RankCheck) -> object:
        """Run a call, and compare its audit's values."""
        self._begin(program)
        result = program(call.leaves, call.passed, rank_check)
        self._end_forward(pytree.tree_leaves(result))
        return result

    def _begin(self, program: JointProgram) -> None:
        """Compare if this is a k-th call; note gradients at the call before it."""
        self._finish()
        self.calls += 1
        program.on_gradients = None
        if self.calls % self.every == 0:
            values = self._items(), self._nans()
            self._reading = Reading(self.groups, *values, self.calls, self.every)
            if self.groups.device_type == "cpu":
                self._reading.read()
        elif (self.calls + 1) % self.every == 0:
            program.on_gradients = weakref.WeakMethod(self._take_gradients)
        self._loss, self._norms = [], ([], None)
        if self.every == 1:
            program.on_gradients = weakref.WeakMethod(self._take_gradients)

    def _end_forward(self, results: Sequence[object]) -> None:
        """Read the CPU's message, or send a GPU's. results: the call's."""
        if self._reading is not None:
            if self.groups.device_type == "cpu":
                self._finish()
            else:
                self._reading.read()
        # A loss is small and whole; comparing larger results would cost time.
        small = (r for r in results if isinstance(r, Tensor) and not isinstance(r, DTensor))
        self._loss = [
            r.detach() for r in small if r.is_floating_point() and r.numel() <= _LARGEST_LOSS
        ]

    def _finish(self) -> None:
        """Read the message that was sent; raise RankError if ranks differ."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.finish()

    def _take_gradients(self, program: JointProgram, gradients: Sequence[object]) -> None:
        inputs = program.captured.inputs
        named = [
            (inputs[i].name, local_of(g))
            for i, g in zip(program.gradient_inputs, gradients)
            if inputs[i].kind == PARAMETER and isinstance(g, Tensor) and g.numel()
        ]
        if named:
            # One kernel for all, in float32: half-precision sums would differ by rounding alone.
            norms = aten._foreach_norm.Scalar([g.float() for _, g in named], 2)
            self._norms = [name for name, _ in named], torch.stack(list(norms))

    def _items(self) -> list[Item]:
        found = dict(self._tensors())
        items = [
            Item(name, axes, local, hash_of_bits(local)) for name, (axes, local) in found.items()
        ]
        names, norms = self._norms
        for i, name in enumerate(names if norms is not None else ()):
            if name in found:
                axes, local = found[name]
                # The root: replicas sum their terms in other orders.
                tolerance = math.sqrt(torch.finfo(local.dtype).eps)
                value = norms[i].double()  # pyright: ignore[reportOptionalSubscript]
                items.append(Item(f"the gradient of {name}", axes, local, value, tolerance))
        for loss in self._loss:
            value = loss.double().norm()
            items.append(Item(_LOSS, 0, loss, value, math.sqrt(torch.finfo(loss.dtype).eps)))
        return items

    def _nans(self) -> dict[str, Tensor]:
        """Return for each trained parameter, by name, whether its shard has a NaN."""
        trained = {
            name: local_of(p.detach())
            for name, p in self.model.named_parameters()
            if p.requires_grad and p.is_floating_point() and local_of(p).numel()
        }
        # A norm is NaN if any element is, and all norms take one pass.
        norms = aten._foreach_norm.Scalar([*trained.values()], 2) if trained else ()
        return {name: norm.isnan().long() for name, norm in zip(trained, norms)}

    def _tensors(self) -> Iterator[tuple[str, tuple[int, Tensor]]]:
        """Yield each tensor that has replicas: its name, the axes that shard it, its shard."""
        names = dict[int, str]()
        for name, tensor in named_tensors(self.model):
            # Tied tensors are one value.
            if id(tensor) in names:
                continue
            names[id(tensor)] = name
            if (axes := self._axes_of(tensor, None)) is not None:
                yield name, (axes, local_of(tensor))
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                owner = names.get(id(parameter), "")
                for kind, value in state.items() if owner else ():
                    if isinstance(value, Tensor):
                        axes = self._axes_of(value, parameter)
                        if axes is not None:
                            yield f"{kind} of {owner}", (axes, local_of(value))

    def _axes_of(self, tensor: Tensor, parameter: Tensor | None) -> int | None:
        """Return the axes that shard a tensor, as bits; None if no other rank has the same.

        parameter: the one that an optimizer state belongs to. A plain state has the layout of the
        parameter's shard if it has its shape.
        """
        if not isinstance(tensor, DTensor) and parameter is not None and tensor.dim():
            is_shard = local_of(parameter).shape == tensor.shape
            return self._axes_of(parameter, None) if is_shard else None
        sharding: set[str] = set()
        if isinstance(tensor, DTensor):
            if tensor.device_mesh != self.groups.device_mesh:
                return None
            sharding = {*spec_of(tensor, self.groups.mesh).sharding_axes}
        elif parameter is None:
            return None
        bits = sum(1 << i for i, name in enumerate(self.axes) if name in sharding)
        # Sharded over all axes: no other rank has the same rows.
        return None if bits == (1 << len(self.axes)) - 1 or not local_of(tensor).numel() else bits
