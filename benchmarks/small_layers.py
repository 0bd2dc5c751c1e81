"""Layers and models of torch_geometric and segmentation_models_pytorch. Tables of patterns name the
arguments of constructors and of forward, one a library; `small_operators.py` has three more."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from narrow_models import BATCH, Built
from torch import nn

Named = dict[str, Any]  # patterns of argument names, and the values of such arguments
FEWER = [  # optional integers of a constructor, and their largest value
    (r"(\w+_)?(n_|num_)?(layers?|blocks|interactions)(_\w+)?|depth", 2),
    (r"(\w+_)?(hidden|lifting|projection|embed|dim|filters|basis)\w*|\w+_(channels|dim|size)", 8),
    (r"(num_|n_)?heads", 2),
]


class Called(nn.Module):
    """A module whose forward takes its arguments by their places."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, **kwargs):
        return self.inner(*kwargs.values())


def modules_of(package: str, *folders: str) -> list[str]:
    """The public modules that a package's folders name, in the form folder.class."""
    found: dict[type, str] = {}
    for folder in folders:
        whole = importlib.import_module(f"{package}.{folder}")
        for own in (whole, *submodules(whole)):
            for name, cls in vars(own).items():
                if inspect.isclass(cls) and issubclass(cls, nn.Module) and name[0] != "_":
                    if cls.__module__.startswith(f"{package}."):
                        found.setdefault(cls, f"{own.__name__}.{name}")
                        if own.__name__ == cls.__module__:  # the class's own place
                            found[cls] = f"{own.__name__}.{name}"
    return sorted(name.removeprefix(f"{package}.") for name in found.values())


def submodules(whole) -> Iterator[Any]:
    """Yield a package's modules that this host can import."""
    for one in pkgutil.iter_modules(getattr(whole, "__path__", ())):
        try:
            yield importlib.import_module(f"{whole.__name__}.{one.name}")
        except Exception:  # noqa: BLE001 (it needs a package that is not installed)
            continue


def class_of(package: str, name: str) -> type[nn.Module]:
    module, cls = name.rsplit(".", 1)
    return getattr(importlib.import_module(f"{package}.{module}"), cls)


def arguments(function: Callable, named: Named, optional: Iterable[str] = ()) -> dict[str, Any]:
    """Needed arguments by their names, and optional ones.

    Raises:
        TypeError: No pattern matches a needed argument.
    """
    given = {}
    for name, one in inspect.signature(function).parameters.items():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) or name == "self":
            continue
        patterns = [pattern for pattern in named if re.fullmatch(pattern, name)]
        needed = one.default is one.empty
        if patterns and (needed or name in optional):
            given[name] = named[patterns[0]]
        elif needed:
            raise TypeError(f"argument {name} is unknown")
    return given


def constructed(cls: type[nn.Module], given: dict[str, Any], named: Named) -> nn.Module:
    """Construct a module; it may name arguments that its **kwargs need."""
    try:
        return cls(**given)
    except TypeError as failed:
        needed = re.findall(r"'(\w+)'", str(failed).partition("required positional")[2])
        found = {n: v for n in needed for p, v in named.items() if re.fullmatch(p, n)}
        if not found:
            raise
        return cls(**given, **found)


def sizes(cls: type[nn.Module]) -> dict[str, int]:
    """Optional integers of a constructor, made small."""
    small = {}
    for name, one in inspect.signature(cls.__init__).parameters.items():
        if type(one.default) is int and one.default > 1:
            most = next((m for p, m in FEWER if re.fullmatch(p, name)), one.default)
            small[name] = min(one.default, most)
    return small


def choices(function: Callable, named: Named) -> Iterator[list[str]]:
    """Yield optional arguments that are known: all, all but one, none."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.default is not p.empty]
    known = [n for n in names if any(re.fullmatch(pattern, n) for pattern in named)]
    yield known
    yield from ([n for n in known if n != one] for one in known if len(known) > 1)
    if known:
        yield []


def calls(model: nn.Module, known: Named) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """Yield a model, and arguments of its forward."""
    for chosen in choices(model.forward, known):
        if kwargs := arguments(model.forward, known, chosen):
            yield model, kwargs
            continue
        for names in (["x", "edge_index"], ["x_dict", "edge_index_dict"], ["x"]):  # of *args
            found = {n: v for n in names for p, v in known.items() if re.fullmatch(p, n)}
            if len(found) == len(names):
                yield Called(model), found


def first_that_runs(
    cls: type[nn.Module],
    worlds: Iterable[tuple[Named, Callable[[nn.Module, dict], Named]]],
) -> Built:
    """The first model and call that run on one device.

    worlds: values of the constructor's and of forward's arguments, by name, for a model.
    """
    first: Exception | None = None
    for named, inputs in worlds:
        for optional in choices(cls.__init__, named):
            try:
                torch.manual_seed(0)
                given = {**sizes(cls), **arguments(cls.__init__, named, optional)}
                model = constructed(cls, given, named).eval()
                known = inputs(model, given)
                for called, kwargs in calls(model, known):
                    try:
                        with torch.no_grad():
                            called(**kwargs)  # lazy layers learn their widths
                        return called, kwargs
                    except Exception as failed:  # noqa: BLE001 (other arguments may fit)
                        first = first or failed
            except Exception as failed:  # noqa: BLE001 (other sizes may fit)
                first = first or failed
    raise first or TypeError("no arguments")


# ---------------------------------------------------------------------------------- torch_geometric

NODES, EDGES, KINDS, GRAPHS = 10, 23, 3, 2


def torch_geometric_names() -> list[str]:
    """Classes with weights or without, of all folders of torch_geometric.nn."""
    own = importlib.import_module("torch_geometric.nn")
    classes = {c for c in vars(own).values() if inspect.isclass(c) and issubclass(c, nn.Module)}
    return sorted(c.__name__ for c in classes if c.__module__.startswith("torch_geometric.nn"))


def perceptron(out: int) -> nn.Module:
    return nn.Sequential(nn.LazyLinear(7), nn.ReLU(), nn.LazyLinear(out))


def torch_geometric_model(name: str) -> Built:
    """A layer or model on a graph of ten nodes."""
    own = importlib.import_module("torch_geometric.nn")
    return first_that_runs(getattr(own, name), map(graphs, *zip(*GRAPH_SIZES)))


GRAPH_SIZES = [
    (i, o, inner) for i, o in ((6, 10), (8, 8), (16, 16)) for inner in (o, i, 1, i * o, 3)
]  # of nodes before and after a layer, and of the layers that it is given


def graphs(width: int, out: int, inner: int) -> tuple[Named, Callable[[nn.Module, dict], Named]]:
    """Arguments of constructors and forwards, for nodes of some widths."""
    own = importlib.import_module("torch_geometric.nn")
    torch.manual_seed(1)
    edges = torch.randint(0, NODES, (2, EDGES))
    ways = [("a", "to", "b"), ("b", "to", "a")]
    batch = (torch.arange(NODES) >= NODES // 2).long()
    conv = own.GCNConv(width, width)
    named: Named = {
        r"in_channels|channels|input_dim|dim_in|in_features|hidden_dim|output_dim": width,
        r"in_edge_channels|edge_dim|raw_msg_dim": 5,
        r"out_channels|dim_out": out,
        r"hidden(_node|_edge)?_channels|hidden_channels|embedding_dim|\w*emb\w*_(dim|size|channels)"
        r"|memory_dim|time_dim|dim_(emb|pe_in|pe_out)": 8,
        r"num_relations|num_edge_types|num_node_types|num_types|num_classes|num_rels": KINDS,
        r"num_nodes": NODES,
        r"num_(gnn_|transformer_|correction_|smoothing_|encoder_)?(layers|blocks)|num_timesteps|K"
        r"|depth|processing_steps|num_radial|num_bilinear|walk_length|context_size|layer": 2,
        r"num_spherical|kernel_size|filter_size|num_clusters|k|seq_len": 3,
        r"dim|space_dimensions|propagate_dimensions": 3,
        r"groups|heads|num_seed_points|patch_size": 2,
        r"max_num_elements": NODES,
        r"alpha|\w+_alpha|p|q": 0.5,
        r"first_aggr": True,
        r"aggregators|aggrs|aggr_list": ["mean", "max"],
        r"aggr": "mean",
        r"scalers?": ["identity", "amplification"],
        r"deg": torch.tensor([1, 3, 4, 2]),
        r"mode": "cat",
        r"mlp_h": perceptron(3),  # an offset of positions
        r"mlp_g": perceptron(width),
        r"(local_|global_|gate_|pos_|attn_)?nn|mlp_\w|dense_module": perceptron(inner),
        r"conv|encoder|module": conv,
        r"discriminator": perceptron(1),
        r"edge_index": edges,
        r"metadata": (["a", "b"], ways),
        r"convs": {way: own.SAGEConv(width, out) for way in ways},
        r"types": ["a", "b"],
        r"interaction_graph": lambda pos, batch: (
            edges,
            (pos[edges[0]] - pos[edges[1]]).norm(dim=-1),
        ),
        r"summary": lambda z, *_, **__: z.mean(0),
        r"corruption": lambda x, *more, **__: (x.flip(0), *more),
        r"message_module": None,
    }

    def inputs(model: nn.Module, given: dict) -> Named:
        torch.manual_seed(2)
        wide = given.get("in_channels", given.get("channels", width))
        x = torch.randn(NODES, wide if isinstance(wide, int) else width)
        kinds = torch.randint(0, KINDS, (NODES,))
        many = torch.randint(0, KINDS, (EDGES,))
        if (
            ".dense." in type(model).__module__
            and "adj" in inspect.signature(model.forward).parameters
        ):
            x = torch.randn(GRAPHS, NODES, width)
        position = torch.randn(NODES, 3)
        return {
            r"x|z|x_0|msg" if "z" not in inspect.signature(model.forward).parameters else "x": x,
            r"z": kinds if not isinstance(model, own.InnerProductDecoder) else x,
            r"(pos_|neg_)?edge_index|hyperedge_index": edges,
            r"edge_weight|hyperedge_weight": torch.rand(EDGES),
            r"edge_attr": torch.rand(
                EDGES, given.get("edge_dim") or given.get("in_edge_channels") or 3
            ),
            r"edge_type": many,
            r"node_type|type_vec|y": kinds,
            r"pos": position,
            r"normal": nn.functional.normalize(torch.randn(NODES, 3), dim=-1),
            r"batch|index": batch,
            r"n_id": torch.arange(NODES),
            r"head_index|tail_index": torch.randint(0, NODES, (7,)),
            r"rel_type": torch.randint(0, KINDS, (7,)),
            r"xs": [x, x.flip(0)],
            r"xs_dict": {"a": [x, x], "b": [x, x]},
            r"x_dict": {"a": x, "b": x.flip(0)},
            r"edge_index_dict": {way: edges for way in [("a", "to", "b"), ("b", "to", "a")]},
            r"adj": torch.randint(0, 2, (GRAPHS, NODES, NODES)).float(),
            r"mask": kinds > 0,
            r"y_soft": torch.rand(NODES, KINDS),
            r"pos_enc": torch.randn(NODES, 8),
            r"u": torch.randn(GRAPHS, width),
        }

    return named, inputs


# --------------------------------------------------------------------- segmentation_models_pytorch

ENCODERS = ("tu-resnet10t", "tu-mobilenetv3_small_050", "tu-vit_tiny_patch16_224")


def segmentation_names() -> list[str]:
    """Each architecture, with encoders of two kinds."""
    own = importlib.import_module("segmentation_models_pytorch")
    classes = (c for c in vars(own).values() if inspect.isclass(c) and issubclass(c, nn.Module))
    return sorted(f"{c.__name__}{more}" for c in classes for more in ("", " of depthwise"))


def segmentation_model(name: str) -> Built:
    """An architecture on pictures of 64 x 64 pixels."""
    own = importlib.import_module("segmentation_models_pytorch")
    cls, _, other = name.partition(" of ")
    encoders = ENCODERS[1:] if other else ENCODERS
    x = torch.randn(BATCH, 3, 64, 64)
    worlds = (
        ({"encoder_name": encoder, "encoder_weights": None, "classes": 3} | more, {"x": image})
        for encoder, image, more in itertools.product(
            encoders, (x, torch.randn(2, 3, 224, 224)), ({"encoder_depth": 3}, {})
        )
    )
    return first_that_runs(getattr(own, cls), ((n, lambda *_, k=k: k) for n, k in worlds))
