"""Layers and models of neuraloperator, e3nn and torchrec. Tables of patterns name the arguments of
constructors and of forward, one a library."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Callable

import torch
from narrow_models import BATCH, Built
from small_layers import Named, class_of, first_that_runs, modules_of, perceptron
from torch import nn

# -------------------------------------------------------------------------------- neuraloperator


def neuralop_names() -> list[str]:
    return modules_of("neuralop", "models", "layers")


def neuralop_model(name: str) -> Built:
    """A model or layer on functions over a grid."""
    grids = [(16, 16), (16,), (8, 8, 8)]
    worlds = itertools.product(((3, 2), (6, 6)), grids, (False, True))
    return first_that_runs(class_of("neuralop", name), (functions(*w) for w in worlds))


def functions(
    widths: tuple[int, int], grid: tuple[int, ...], last: bool
) -> tuple[Named, Callable[[nn.Module, dict], Named]]:
    """Arguments of operators; last: a function's values stand in the last dimension."""
    width, out = widths
    modes = (4,) * len(grid)
    named: Named = {
        r"n_modes": modes if not last else [modes, modes],
        r"in_channels|num_features|in_features|dim": width,
        r"out_channels|out_features": out,
        r"(fno_|gno_)?hidden_channels|embed_dim|head_n_channels": 8,
        r"n_dim|coord_dim|(in_|out_)?gno_coord_dim": len(grid),
        r"n_heads": 2 if not last else [2, 2],
        r"uno_out_channels": [8, 8],
        r"uno_n_modes": [modes, modes],
        r"fno_n_modes": modes,
        r"uno_scalings": [(1,) * len(grid)] * 2,
        r"per_layer_scaling_factors|attention_scaling_factors": [(1,) * len(grid)] * 2,
        r"default_in_shape|in_shape": grid,
        r"out_shape": grid,
        r"kernel_shape": [2, 4],
        r"kernel_size": 3,
        r"radius(_cutoff)?": 0.5,
        r"(gno_)?use_open3d": False,
        r"layers|channel_mlp_layers": [width, 8, out],
        r"domain_padding": 0.25,
        r"base_model|main_module|main_conv|module": None,
    }

    def inputs(model: nn.Module, given: dict) -> Named:
        torch.manual_seed(2)
        dims = [16, width] if last and len(grid) == 1 else [width, *grid]
        x = torch.randn(BATCH, *dims)
        points = torch.rand(7, len(grid))
        return {
            r"x|data": x,
            r"grid_width": 1 / 16,
            r"dim": -1,
            r"radius": 0.5,
            r"coordinates": torch.rand(BATCH, 7, 2),
            r"u_src": torch.randn(BATCH, 7, width),
            r"pos_src": torch.rand(BATCH, 7, len(grid)),
            r"y|input_geom|latent_queries|output_queries|queries": points,
        }

    return named, inputs


# ------------------------------------------------------------------------------------------ e3nn


def e3nn_names() -> list[str]:
    own = importlib.import_module("e3nn.nn.models")
    versions = [f"nn.models.{m.name}" for m in pkgutil.iter_modules(own.__path__)]
    return modules_of("e3nn", "o3", "nn", *versions)


def e3nn_model(name: str) -> Built:
    """An equivariant layer on some points' features."""
    importlib.import_module("e3nn").set_optimization_defaults(jit_mode="eager")
    worlds = itertools.product(
        ("1x0e + 1x1o", "6x0e + 3x1o"), ("5x0e + 2x1o", "6x0e + 3x1o"), (0, 1)
    )
    return first_that_runs(class_of("e3nn", name), (representations(*w) for w in worlds))


def representations(
    second: str, out: str, filled: int
) -> tuple[Named, Callable[[nn.Module, dict], Named]]:
    """Arguments of equivariant layers; filled: all weights of paths are given."""
    o3 = importlib.import_module("e3nn.o3")
    irreps, silu = o3.Irreps("6x0e + 3x1o"), nn.functional.silu
    named: Named = {
        r"irreps_in2|irreps_(edge|sh)\w*": o3.Irreps(second),
        r"irreps(_in1?|_node_input|_hidden)?": irreps,
        r"irreps_out|irreps_node_output": o3.Irreps(out),
        r"irreps_outs": [o3.Irreps("3x1o"), o3.Irreps("6x0e")],
        r"irreps_node_attr": o3.Irreps("4x0e"),
        r"irreps_scalars": o3.Irreps("6x0e"),
        r"irreps_gates": o3.Irreps("3x0e"),
        r"irreps_gated": o3.Irreps("3x1o"),
        r"ir": "1o",
        r"act_scalars": [silu],
        r"act_gates": [torch.sigmoid],
        r"acts": [silu, None],
        r"act|scalar_nonlinearity|f": torch.tanh,
        r"instructions": [(0, 0, 0, "uvw", True), (0, 1, 1, "uvw", True)]
        if filled
        else [(1,), (0,)],
        r"hs|fc_neurons": [5, 8, 6],
        r"res|resolution": (8, 7) if filled else 8,
        r"lmax\w*|l|ls": 2 if not filled else [0, 1, 2],
        r"normalize": True,
        r"layers|radial_layers": 1,
        r"mul|radial_neurons|fc_hidden|number_of_edge_features": 5,
        r"number_of_basis": 5,
        r"max_radius|num_neighbors|num_nodes": 2.5,
        r"p": 0.5,
        r"formula": "ij=ji",
        r"diameter|scale": 3.0,
        r"size": 5,
        r"num_radial_basis": 3,
        r"first": o3.Linear(irreps, o3.Irreps(second)),
        r"second": o3.Linear(o3.Irreps(second), o3.Irreps(out)),
    }

    def inputs(model: nn.Module, given: dict) -> Named:
        torch.manual_seed(2)
        own = [getattr(model, n, None) for n in ("irreps_in1", "irreps_in", "_irreps_in")]
        widths = [o.dim for o in own if hasattr(o, "dim")]
        width = widths[0] if widths else given.get("hs", [irreps.dim])[0]
        x, source = torch.randn(7, width), torch.randint(0, 7, (17,))
        edges = torch.stack([source, (source + 1) % 7])
        position = torch.randn(7, 3)
        if "voxel" in type(model).__module__:
            x = torch.randn(2, width, 6, 6, 6)
        z, edge_attr = torch.randn(7, 4), torch.randn(17, o3.Irreps(second).dim)
        return {
            r"x|image|features|input1?|node_input|node_features|first": x,
            r"y|input2": torch.randn(7, o3.Irreps(second).dim),
            r"alpha|beta": torch.rand(7),
            r"node_attr": z,
            r"edge_src": edges[0],
            r"edge_dst": edges[1],
            r"edge_attr": edge_attr,
            r"edge_length_embedded|edge_scalars|edge_features": torch.randn(17, 5),
            r"data": {
                **{"pos": position, "x": x, "z": z, "node_attr": z},
                **{"edge_index": edges, "edge_attr": edge_attr},
            },
        }

    return named, inputs


# -------------------------------------------------------------------------------------- torchrec


def torchrec_names() -> list[str]:
    return modules_of("torchrec", "modules", "models")


class Joined(nn.Module):
    """A layer on the values of all features."""

    def __init__(self, out: int):
        super().__init__()
        self.layer = nn.LazyLinear(out)

    def forward(self, features) -> torch.Tensor:
        return self.layer(features.values())


def torchrec_model(name: str) -> Built:
    """A module on two features, of jagged rows."""
    worlds = itertools.product((False, True), (8, 2 * 8, 24), (False, True))
    return first_that_runs(class_of("torchrec", name), (features(*w) for w in worlds))


def features(
    bags: bool, width: int, dense: bool
) -> tuple[Named, Callable[[nn.Module, dict], Named]]:
    """Arguments of tables; bags: a row's words are added. dense: embeddings stand for features."""
    configs = importlib.import_module("torchrec.modules.embedding_configs")
    tables = importlib.import_module("torchrec.modules.embedding_modules")
    jagged = importlib.import_module("torchrec.sparse.jagged_tensor")
    processors = importlib.import_module("torchrec.modules.feature_processor_")
    config = configs.EmbeddingConfig if not bags else configs.EmbeddingBagConfig
    keys = ["f1", "f2"]

    def rows(kind):
        return [
            kind(name=f"t_{k}", embedding_dim=8, num_embeddings=11, feature_names=[k]) for k in keys
        ]

    named: Named = {
        r"tables": rows(config),
        r"embedding_bag_collection": tables.EmbeddingBagCollection(
            rows(configs.EmbeddingBagConfig)
        ),
        r"embedding_collection": tables.EmbeddingCollection(tables=rows(configs.EmbeddingConfig)),
        r"dense_in_features|num_dense_features": 5,
        r"in_features|in_size|fm_in_features|input_dims?": width,
        r"out_size|hidden_layer_size|deep_fm_dimension": 6,
        r"embedding_dim": 8,
        r"dense_arch_layer_sizes": [6, 8],
        r"over_arch_layer_sizes": [6, 1],
        r"interaction_branch\d_layer_sizes": [16, 16],
        r"\w*layer_sizes": [6, 8],
        r"num_sparse_features": 2,
        r"sparse_feature_names": keys,
        r"\w*num_layers": 2,
        r"\w*low_rank\w*|num_experts": 2,
        r"(max_feature|feature_max)_lengths": {k: 5 for k in keys},
        r"max_feature_length": 5,
        r"dense_module": perceptron(6),
        r"crossnet|interaction_branch\d": perceptron(16),
        r"device": torch.device("cpu"),
        r"groups": [["f1"], ["f2"]],
        r"keys": ["a", "b"],
        r"embedding_module": tables.EmbeddingBagCollection(rows(configs.EmbeddingBagConfig)),
        r"interaction_module": Joined(6),
        r"feature_processors": {
            k: processors.PositionWeightedModule(max_feature_length=5) for k in keys
        },
        r"pool_size": 11,
        r"dim": 8,
        r"(values_)?dtype": torch.float32,
    }

    def inputs(model: nn.Module, given: dict) -> Named:
        torch.manual_seed(2)
        lengths = torch.tensor([2, 0, 1, 3, 1, 1, 2, 1])
        words = torch.randint(0, 11, (int(lengths.sum()),))
        bag = jagged.KeyedJaggedTensor(keys=keys, values=words, lengths=lengths)
        embedded = torch.randn(4, 2, 8)
        wide = given.get("dense_in_features", given.get("num_dense_features", 8))
        whole = given.get("in_features", given.get("in_size", width))
        return {
            r"features|sparse_features|input_kjt": embedded if dense else bag,
            r"dense_features": torch.randn(4, wide),
            r"input|features": torch.randn(4, whole),
            r"embeddings|values": [torch.randn(4, 8), torch.randn(4, 8)],
            r"ids": torch.randint(0, 11, (5,)),
            r"keyed_tensors": [
                jagged.KeyedTensor(keys=keys, length_per_key=[3, 5], values=torch.randn(4, 8)),
            ],
        }

    return named, inputs
