"""transfer: weights into another mesh, layout, dtype or names, each byte sent once.

    gspmd.transfer(trained, engine)             # between two meshes of one job
    shards = gspmd.transfer(model, wants)       # plain shards, as wants(rank, name, shape) says

All ranks exchange which part of each tensor they have, and which they want. Every rank computes the
same pieces from that: the overlap of what one has and another wants. A piece comes from the rank
itself, else from its host, else from any.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..comm.box_exchange import Box, elements
from ..comm.hosts import host_name
from ..comm.process_groups import backend_of
from ..dtensor.storage import spec_of
from ..errors import ShardingError
from ..layout.mesh import Mesh
from .checkpoint_files import gathered, meet_all, run
from .full_state import part_of_shard
from .load_full_state import names_of, raise_first, stored_tensors

BUCKET = 1 << 26  # bytes that a rank sends, or receives, in one round

_WHY = "transfer copies each tensor of the source into the target's of the same name"
_FIX = "pass names=, which gives the target's name for one of the source, or None to leave it out"

Wants = Callable[[int, str, tuple[int, ...]], Sequence[slice] | None]
Names = Mapping[str, str | None] | Callable[[str], str | None]


@dataclass
class Transferred:
    """The bytes of a transfer on this rank. tensors: those of a callable target, by name."""

    sent_bytes: int = 0
    received_bytes: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)


class TensorPart(NamedTuple):
    """The part of a tensor that one rank has, or wants. boxes: several if it is stored by parts."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]


class TransferPiece(NamedTuple):
    """A part of a tensor that one rank sends, or keeps, for one that wants it."""

    name: str
    source: int
    target: int
    box: Box
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return elements(self.box) * self.dtype.itemsize


@torch.no_grad()
def transfer(
    source: nn.Module | Mapping[str, Any] | None,
    target: nn.Module | Mapping[str, Any] | Wants | None,
    names: Names | None = None,
) -> Transferred:
    """Copy a model's weights into another model's, on the same ranks or on others.

    Call it on every rank of the default process group. Each rank receives the bytes that it lacks,
    once, from the nearest rank that has them. At most 64 MiB a rank travel at once, and no rank
    needs memory for a whole tensor. Where dtypes differ, the smaller one is sent.

    Args:
        source: The result of `parallelize`, another module, or a state_dict with plain tensors and
            DTensors. A plain tensor is whole. None on a rank that has none of it.
        target: The same, written in place; None on a rank that gets nothing. Or a function of
            (rank, name, shape) that returns the slices, one a dimension, of the plain tensor that
            an inference engine's rank loads, or None. The names that it gets are the source's.
        names: A mapping or function from the source's names to the target's. None for a name
            leaves that tensor out. A mapping keeps the names that it lacks.

    Returns:
        The bytes that this rank has sent and received, and the tensors that a function wanted.

    Raises:
        ShardingError: On every rank and before anything is sent, if the target has a tensor that
            no rank has, another shape, or no place for a tensor of the source.

    Example:
        >>> import torch.distributed as dist
        >>> from torchgspmd import parallelize, transfer
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> trained = parallelize(torch.nn.Linear(4, 8), Mesh(data=1))
        >>> engine = torch.nn.Linear(4, 8).bfloat16()
        >>> transfer(trained, engine).sent_bytes
        0
        >>> engine.weight.equal(trained.weight.full_tensor().bfloat16())
        True
        >>> wants = lambda rank, name, shape: [slice(0, 2)] + [slice(None)] * (len(shape) - 1)
        >>> [*transfer(trained, wants).tensors["weight"].shape]
        [2, 4]
        >>> dist.destroy_process_group()
    """
    meet_all("transfer")
    rank = dist.get_rank() if dist.is_initialized() else 0
    sources, held = dict[str, Tensor](), dict[str, TensorPart]()
    problem = ""
    try:
        sources = _renamed(_tensors(source), names)
        held = _parts(sources)
    except Exception as error:  # perhaps of this rank alone, for which the others would wait
        problem = f"{type(error).__name__}: {error}"
    rows = gathered([problem, host_name(), _as_json(held)])
    raise_first([row[0] for row in rows], _WHY, _FIX)
    hosts, holders = [row[1] for row in rows], [*map(_from_json, (row[2] for row in rows))]

    shapes = {name: part for parts in holders for name, part in parts.items()}
    made, targets, wanted = dict[str, Tensor](), dict[str, Tensor](), dict[str, TensorPart]()
    known: list[str] = []
    try:
        if callable(target) and not isinstance(target, nn.Module):
            wanted, known = _asked(target, rank, shapes), [*shapes]
            device = next((t.device for t in sources.values()), None)
            for name, part in wanted.items():
                sizes = [e - b for b, e in part.boxes[0]]
                made[name] = torch.empty(sizes, dtype=part.dtype, device=device)
            targets = made
        else:
            known = [*(targets := _tensors(target))]
            targets = _once(targets, shapes)
            wanted = _parts(targets)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    rows = gathered([problem, known, _as_json(wanted)])
    wanters = [*map(_from_json, (row[2] for row in rows))]
    everywhere = {name for row in rows for name in row[1]}
    problems = [row[0] or _mismatch(shapes, parts) for row, parts in zip(rows, wanters)]
    raise_first(problems, _WHY, _FIX)
    if unknown := sorted({*shapes} - everywhere):
        raise_first([f"the target has no {names_of(unknown)}"], _WHY, _FIX)

    result = Transferred(tensors=made)
    if made:
        written = {name: {wanted[name].boxes[0]: tensor} for name, tensor in made.items()}
    else:
        written = {name: _views(tensor) for name, tensor in targets.items()}
    move = _Move(rank, {n: _views(t) for n, t in sources.items()}, written, result)
    for pieces in _rounds(_pieces(holders, wanters, hosts)):
        run(move.round, pieces)
    return result


def _tensors(model: nn.Module | Mapping[str, Any] | None | Wants) -> dict[str, Tensor]:
    if isinstance(model, nn.Module):
        return stored_tensors(model)
    if model is None or isinstance(model, Mapping):
        return {n: t for n, t in (model or {}).items() if isinstance(t, Tensor)}
    raise ShardingError.here(
        f"transfer got {type(model).__name__}", fix="pass a module, a state_dict, or None"
    )


def _renamed(tensors: Mapping[str, Tensor], names: Names | None) -> dict[str, Tensor]:
    """Return the source's tensors by the target's names."""
    given = names if names is not None else {}
    find = given if callable(given) else lambda name: given.get(name, name)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if (new := find(name)) is None:
            continue
        if new in found:
            raise ShardingError.here(f"two tensors of the source have the name '{new}'")
        found[new] = tensor
    return found


def _once(targets: Mapping[str, Tensor], known: Mapping[str, object]) -> dict[str, Tensor]:
    """Leave out further names of tied tensors: those that the source lacks, first."""
    by_tensor: dict[int, str] = {}
    for name, tensor in sorted(targets.items(), key=lambda item: item[0] not in known):
        by_tensor.setdefault(id(tensor), name)
    return {name: targets[name] for name in by_tensor.values()}


def _parts(tensors: Mapping[str, Tensor]) -> dict[str, TensorPart]:
    """Return this rank's part in each tensor, if it has one."""
    found = {name: (tensor, (*_views(tensor),)) for name, tensor in tensors.items()}
    return {
        name: TensorPart(tuple(tensor.shape), tensor.dtype, boxes)
        for name, (tensor, boxes) in found.items()
        if boxes
    }


def _views(tensor: Tensor) -> dict[Box, Tensor]:
    """Return this rank's values of a tensor, by the boxes of the whole that they are."""
    if tensor.is_meta:
        raise ShardingError.here(
            "a tensor is on meta: it has no values", fix="call model.to_empty(device=...) first"
        )
    if not isinstance(tensor, DTensor):
        return {tuple((0, size) for size in tensor.shape): tensor.detach()}
    ranks = tensor.device_mesh.mesh.flatten().tolist()
    if dist.get_rank() not in ranks:
        return {}
    mesh = Mesh.from_device_mesh(tensor.device_mesh)
    at = mesh.coordinates(ranks.index(dist.get_rank()))
    spec, shape = spec_of(tensor, mesh), tuple(tensor.shape)
    whole = tuple((part.start, part.stop) for part in part_of_shard(spec, shape, mesh, at))
    views = {whole: tensor.to_local()}
    for d, count in enumerate(spec.parts):
        # A shard has as many rows of each part, one part after the other.
        if count > 1:
            rows = (whole[d][1] - whole[d][0]) // count
            begin = mesh.index(spec.dims[d], at) * rows
            starts = [i * shape[d] // count + begin for i in range(count)]
            views = {
                (*box[:d], (first, first + rows), *box[d + 1 :]): view.narrow(d, i * rows, rows)
                for box, view in views.items()
                for i, first in enumerate(starts)
            }
    return views


def _asked(target: Wants, rank: int, shapes: Mapping[str, TensorPart]) -> dict[str, TensorPart]:
    """Return the parts that a function wants on this rank."""
    found: dict[str, TensorPart] = {}
    for name, whole in shapes.items():
        slices = target(rank, name, whole.shape)
        if slices is None:
            continue
        if len(slices) != len(whole.shape) or any(s.step not in (None, 1) for s in slices):
            raise ShardingError.here(
                f"the target wants {slices} of '{name}', which has {len(whole.shape)} dimensions",
                fix="return a slice without a step for each dimension, or None",
            )
        sizes = zip(slices, whole.shape)
        box = tuple((b, max(b, e)) for b, e, _ in (s.indices(size) for s, size in sizes))
        found[name] = TensorPart(whole.shape, whole.dtype, (box,))
    return found


def _mismatch(shapes: Mapping[str, TensorPart], wanted: Mapping[str, TensorPart]) -> str:
    """Return the reason why a rank's parts cannot come from the source, or nothing."""
    if missing := [name for name in wanted if name not in shapes]:
        return f"the source has no {names_of(missing)}"
    for name, part in wanted.items():
        if part.shape != shapes[name].shape:
            return (
                f"'{name}' has the shape {[*shapes[name].shape]} in the source, "
                f"{[*part.shape]} in the target"
            )
    return ""


def _as_json(parts: Mapping[str, TensorPart]) -> list[list]:
    return [[n, p.shape, str(p.dtype).removeprefix("torch."), p.boxes] for n, p in parts.items()]


def _from_json(rows: Iterable[Sequence[Any]]) -> dict[str, TensorPart]:
    return {
        name: TensorPart(
            tuple(shape),
            getattr(torch, dtype),
            tuple(tuple((begin, end) for begin, end in box) for box in boxes),
        )
        for name, shape, dtype, boxes in rows
    }


# -------------------------------------------------------------------------------------- pieces


def _pieces(
    holders: Sequence[Mapping[str, TensorPart]],
    wanters: Sequence[Mapping[str, TensorPart]],
    hosts: Sequence[str],
) -> Iterator[list[TransferPiece]]:
    """Yield each tensor's pieces, the same on every rank."""
    by_box: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    dtypes: dict[str, torch.dtype] = {}
    for rank, parts in enumerate(holders):
        for name, part in parts.items():
            for box in part.boxes:
                by_box[name][box].append(rank)
            dtypes[name] = part.dtype
    sent = [0] * len(holders)
    for name, boxes in by_box.items():
        pieces: list[TransferPiece] = []
        wanted = [(r, parts[name]) for r, parts in enumerate(wanters) if name in parts]
        for target, part in wanted:
            dtype = min(dtypes[name], part.dtype, key=lambda d: d.itemsize)
            for want, (box, ranks) in itertools.product(part.boxes, boxes.items()):
                common = _overlap(box, want)
                if not elements(common):
                    continue
                # Among equally near ranks, the one that has sent least.
                source = min(
                    ranks, key=lambda r: (r != target, hosts[r] != hosts[target], sent[r], r)
                )
                pieces.append(TransferPiece(name, source, target, common, dtype))
                sent[source] += pieces[-1].bytes * (source != target)
        yield pieces


def _rounds(tensors: Iterable[Sequence[TransferPiece]]) -> Iterator[list[TransferPiece]]:
    """Yield pieces such that a rank sends, and receives, at most BUCKET bytes at once."""
    chosen: list[TransferPiece] = []
    sent, received = defaultdict[int, int](int), defaultdict[int, int](int)
    for piece in (part for pieces in tensors for whole in pieces for part in _cut(whole)):
        moved = piece.bytes * (piece.source != piece.target)
        if chosen and max(sent[piece.source], received[piece.target]) + moved > BUCKET:
            yield chosen
            chosen, sent, received = [], defaultdict(int), defaultdict(int)
        chosen.append(piece)
        sent[piece.source] += moved
        received[piece.target] += moved
    if chosen:
        yield chosen


def _cut(piece: TransferPiece) -> Iterator[TransferPiece]:
    """Yield a piece in parts of at most BUCKET bytes, along its longest dimension."""
    if piece.bytes <= BUCKET or piece.source == piece.target:
        yield piece
        return
    d = max(range(len(piece.box)), key=lambda i: piece.box[i][1] - piece.box[i][0])
    begin, end = piece.box[d]
    middle = (begin + end) // 2
    for part in ((begin, middle), (middle, end)):
        yield from _cut(piece._replace(box=(*piece.box[:d], part, *piece.box[d + 1 :])))


def _overlap(first: Box, other: Box) -> Box:
    return tuple((max(a, c), max(a, c, min(b, d))) for (a, b), (c, d) in zip(first, other))


class _Move(NamedTuple):
    """This rank's tensors, between which pieces move."""

    rank: int
    sources: Mapping[str, dict[Box, Tensor]]
    targets: Mapping[str, dict[Box, Tensor]]
    result: Transferred

    def round(self, pieces: Sequence[TransferPiece]) -> None:
        """Move pieces: one message for each pair of ranks."""
        sends, receives = defaultdict[int, list](list), defaultdict[int, list](list)
        for piece in pieces:
            if piece.source == self.rank == piece.target:
                self._to(piece).copy_(self._from(piece))
            elif piece.source == self.rank:
                sends[piece.target].append(piece)
            elif piece.target == self.rank:
                receives[piece.source].append(piece)
        out = {r: torch.cat([*map(self._packed, each)]) for r, each in sends.items()}
        into = {
            r: torch.empty(sum(p.bytes for p in each), dtype=torch.uint8, device=_carrier())
            for r, each in receives.items()
        }
        # In one order on both sides of each pair, for NCCL.
        operations = [dist.P2POp(dist.isend, message, r) for r, message in sorted(out.items())]
        operations += [dist.P2POp(dist.irecv, message, r) for r, message in sorted(into.items())]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        self.result.sent_bytes += sum(message.numel() for message in out.values())
        for r, each in receives.items():
            self.result.received_bytes += into[r].numel()
            for piece, part in zip(each, into[r].split([piece.bytes for piece in each])):
                place = self._to(piece)
                value = torch.empty(place.shape, dtype=piece.dtype, device=_carrier())
                value.view(-1).view(torch.uint8).copy_(part)
                place.copy_(value)

    def _packed(self, piece: TransferPiece) -> Tensor:
        # As bytes, since gloo lacks some dtypes.
        return self._from(piece).to(_carrier(), piece.dtype).contiguous().view(-1).view(torch.uint8)

    def _from(self, piece: TransferPiece) -> Tensor:
        return _sliced(self.sources[piece.name], piece.box)

    def _to(self, piece: TransferPiece) -> Tensor:
        return _sliced(self.targets[piece.name], piece.box)


def _carrier() -> str:
    """Return the device that messages of the default process group are on."""
    return "cuda" if backend_of("cuda") == "nccl" else "cpu"


def _sliced(views: Mapping[Box, Tensor], box: Box) -> Tensor:
    """Return a piece of this rank's values of a tensor."""
    around, view = next((b, v) for b, v in views.items() if _overlap(b, box) == box)
    return view[tuple(slice(b - at, e - at) for (b, e), (at, _) in zip(box, around))]
