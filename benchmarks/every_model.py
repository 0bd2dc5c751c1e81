"""Model classes of other libraries by their own configurations, under random layouts, against one
device.

    python benchmarks/every_model.py --library transformers --part 0/10 --json rows.json
        every tenth model class of transformers; rows that rows.json has already are not run again
    python benchmarks/every_model.py --library timm --only resnet18
    python benchmarks/every_model.py --table rows.json
        the counts of a file, and each class that is not right

A configuration is made small by one function for each library: two layers of each kind, narrow,
four heads. Every parameter is marked at random on Mesh(data=2, model=2). Results and gradients of
plan(...).simulate are compared with eager PyTorch, in float64 if the model computes in it, padding
poisoned with NaN. A row is right, refused (a ShardingError), an error, wrong, or not built: one
device cannot run it either, for the reason given.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import json
import os
import random
import re
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from coverage import Pool, differs, failure, random_spec
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import torchgspmd as gspmd
from torchgspmd.capture.state.object_trees import opened
from torchgspmd.errors import ShardingError

Built = tuple[nn.Module, dict[str, Any]]  # a model and the arguments of a call
EXACT, SINGLE = 1e-8, 1e-4  # relative, of float64 and float32: some hundred operations deep
MESH = gspmd.Mesh(data=2, model=2)
BATCH, LENGTH, VOCABULARY, IMAGE = 4, 16, 96, 32

# ------------------------------------------------------------------------------------ transformers

NUMBERS = [  # the first that matches a name of a configuration
    (r"vocab_size$", VOCABULARY),
    (r"(num_key_value|kv)_heads?$", 2),
    (r"(per_tok|top_?k)$", 2),
    (r"(head|key|value|rope|nope).*_dim$|^d_kv$|^dim_head$", 8),
    (r"heads?$|^n_groups?$|mamba_n_groups$", 4),
    (r"(intermediate|inner|ffn|mlp|feed_?forward).*(size|dim)$|^d_ff$|^n_inner$", 64),
    (r"expert.*size$", 32),
    (r"(experts|n_shared|num_shared).*$", 4),
    (r"layers?$|^depth$|^n_layer|num_blocks$|_depth$", 2),
    (r"(lora|low_rank|kv_lora|q_lora).*rank|_rank$", 8),
    (r"(hidden|embed|model|projection|output|width|channel).*(size|dim|dims|embd)$", 32),
    (r"^(d_model|n_embd|embed_dim|dim|hidden_size|d_embed)$", 32),
    (r"^(image_size|img_size|input_size|crop_size)$", IMAGE),
    (r"^patch_size$|patch_stride$", 8),
    (r"max.*(position|length|len)|n_positions|^n_ctx$|seq_len", 128),
]
SEVERAL = [
    (r"depth|layers|blocks", lambda i: 1),
    (r"head", lambda i: 2),
    (r"hidden|embed|dim|width|channels", lambda i: 16 << min(i, 3)),
]


def shrink(config) -> None:
    """Make a configuration of transformers, and those within it, small."""
    kinds = vars(config).get("layer_types")
    layers = 2
    if isinstance(kinds, list) and kinds:
        kinds = sorted(set(kinds))
        kinds = kinds if len(kinds) > 1 else kinds * 2
        config.layer_types, layers = kinds, len(kinds)
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_diff_dict"):
            shrink(value)
        elif isinstance(value, bool) or name.startswith("_"):
            continue
        elif isinstance(value, int) and name.endswith("token_id"):
            setattr(config, name, value % VOCABULARY)
        elif isinstance(value, int):
            for pattern, small in NUMBERS:
                if re.search(pattern, name):
                    setattr(
                        config,
                        name,
                        min(value, layers if small == 2 and "layer" in name else small),
                    )
                    break
        elif isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
            for pattern, make in SEVERAL:
                if re.search(pattern, name):
                    made = [min(v, make(i)) for i, v in enumerate(value)]
                    setattr(config, name, type(value)(made))
                    break
    for name in ("use_cache", "scale_embedding"):
        if hasattr(config, name):
            setattr(config, name, False)


def transformers_names() -> list[str]:
    """Two model classes of each family: the bare model, and one with a head that makes logits."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    found: dict[str, list[str]] = {}
    mappings = [m for m in dir(auto) if m.startswith("MODEL_") and m.endswith("_MAPPING_NAMES")]
    heads = ["MODEL_MAPPING", "CAUSAL_LM", "SEQ_TO_SEQ", "IMAGE_TEXT", "MASKED_LM", ""]
    for mapping in sorted(mappings, key=lambda m: next(i for i, h in enumerate(heads) if h in m)):
        for family, value in getattr(auto, mapping).items():
            known = found.setdefault(family, [])
            for name in value if isinstance(value, tuple | list) else (value,):
                if len(known) < 2 and name not in known:
                    known.append(name)
    return sorted({name for names in found.values() for name in names})


def transformers_model(name: str) -> Built:
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    cls = getattr(transformers, name)
    config = cls.config_class()
    shrink(config)
    try:
        model = cls(config)
    except ValueError:  # some part of it has no fused attention
        config._attn_implementation = "eager"
        model = cls(config)
    error: Exception | None = None
    for kwargs in transformers_inputs(model, config):
        try:
            model.eval()(**copy.deepcopy(kwargs))
            return model, kwargs
        except Exception as failed:  # noqa: BLE001 (the next arguments may do)
            error = error or failed
    raise error or TypeError("no arguments")


def transformers_inputs(model: nn.Module, config) -> Iterator[dict[str, Any]]:
    """Yield arguments by the names in forward's signature: with the main input alone, with all."""
    names = inspect.signature(model.forward).parameters
    text = getattr(config, "text_config", config)
    vocabulary = getattr(text, "vocab_size", None) or VOCABULARY
    image = getattr(getattr(config, "vision_config", config), "image_size", IMAGE)
    size = (image, image) if isinstance(image, int) else tuple(image)
    channels = getattr(getattr(config, "vision_config", config), "num_channels", 3)
    tokens = partial(torch.randint, 3, vocabulary)
    mels = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", None) or 80
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None) or 4
    made: dict[str, Callable[[], Any]] = {
        "input_ids": lambda: tokens((BATCH, LENGTH)),
        "decoder_input_ids": lambda: tokens((BATCH, LENGTH)),
        "pixel_values": lambda: torch.randn(BATCH, channels, *size),
        "input_features": lambda: torch.randn(
            BATCH, mels, 2 * getattr(config, "max_source_positions", 64)
        ),
        "input_values": lambda: torch.randn(BATCH, 2048),
        "pixel_values_videos": lambda: torch.randn(BATCH, frames, channels, *size),
        "bbox": lambda: torch.randint(0, 8, (BATCH, LENGTH, 4)).cumsum(-1),
        "state": lambda: torch.randn(BATCH, 32),
    }
    main = getattr(model, "main_input_name", "input_ids")
    needed = {n for n, p in names.items() if n in made and p.default is inspect.Parameter.empty}
    decoder = {"decoder_input_ids"} if getattr(config, "is_encoder_decoder", False) else set()
    tried = [{main}, {main} | decoder, {"input_ids"}, {"input_ids", "pixel_values"}, {*made}]
    for wanted in tried:
        chosen = sorted((wanted | needed) & set(names) & set(made))
        if chosen:
            yield {name: made[name]() for name in chosen}


# -------------------------------------------------------------------------------- timm, diffusers


def without_cuda_ops() -> None:
    """Define the operations without which torchvision cannot be imported on a host without CUDA."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    without_cuda_ops.library = library


def timm_names() -> list[str]:
    """One model of each of timm's modules: its first."""
    timm = importlib.import_module("timm")
    return [f"{m}" for m in timm.list_modules() if timm.list_models(module=m)]


SMALLEST = ("atto", "femto", "pico", "nano", "tiny", "xxs", "xs", "small", "_s", "mini", "lite")


def timm_model(module: str) -> Built:
    """A module's model with a small name, and fewer layers where the constructor takes some."""
    timm = importlib.import_module("timm")
    names = timm.list_models(module=module)
    name = next((n for small in SMALLEST for n in names if small in n), names[0])
    model, fewer = None, {"num_classes": 10, "embed_dim": 32, "num_heads": 2, "depth": 2}
    while model is None:
        try:
            model = timm.create_model(name, **fewer)
        except Exception:  # noqa: BLE001 (it has no such argument, or wants a list)
            if not fewer:
                raise
            fewer.popitem()
            fewer.pop("num_heads", None)
    size = model.default_cfg.get("input_size", (3, 224, 224))
    if not model.default_cfg.get("fixed_input_size") and size[-1] > 64:
        size = (3, 64, 64)
    return model, {"x": torch.randn(BATCH, *size)}


def torchvision_names() -> list[str]:
    torchvision = importlib.import_module("torchvision")
    heads: dict[str, str] = {}
    for name in torchvision.models.list_models(module=torchvision.models):
        heads.setdefault(re.split(r"[\d_]", name)[0], name)
    return sorted(heads.values())


def torchvision_model(name: str) -> Built:
    torchvision = importlib.import_module("torchvision")
    model = torchvision.models.get_model(name, num_classes=10)
    side = 299 if "inception" in name else 224 if name.startswith(("vit", "maxvit")) else 64
    return model, {"x": torch.randn(BATCH, 3, side, side)}


DIFFUSERS = r"(Transformer\w*Model|UNet\w*Model|Autoencoder\w+|VQModel|ControlNetModel|\w+DModel)$"


def diffusers_names() -> list[str]:
    diffusers = importlib.import_module("diffusers")
    return sorted(n for n in dir(diffusers) if re.match(r"\w*?" + DIFFUSERS, n))


def diffusers_model(name: str) -> Built:
    """Widths of a constructor's defaults, made small."""
    diffusers = importlib.import_module("diffusers")
    cls = getattr(diffusers, name)
    given: dict[str, Any] = {}
    for key, parameter in inspect.signature(cls.__init__).parameters.items():
        value = parameter.default
        if value is inspect.Parameter.empty or isinstance(value, bool) or value is None:
            continue
        if isinstance(value, int):
            if re.search(r"num_(single_|refiner_)?layers|^num_layers|layers_per_block", key):
                given[key] = min(value, 1)
            elif re.search(r"num_attention_heads|num_heads|n_heads", key):
                given[key] = min(value, 2)
            elif re.search(r"cross_attention_dim|joint_attention_dim|caption|text_dim|pooled", key):
                given[key] = min(value, 32)
        elif isinstance(value, tuple) and "channels" in key:
            given[key] = tuple(min(v, 32) for v in value)
    model = cls(**given)
    return model, diffusers_inputs(model)


def diffusers_inputs(model) -> dict[str, Any]:
    names, config = inspect.signature(model.forward).parameters, model.config
    side = getattr(config, "sample_size", None)
    side = side if isinstance(side, int) and side <= 64 else 16
    channels = getattr(config, "in_channels", 4)
    text = next(
        (
            getattr(config, n)
            for n in (
                "joint_attention_dim",
                "cross_attention_dim",
                "caption_channels",
                "text_dim",
                "text_embed_dim",
            )
            if isinstance(getattr(config, n, None), int)
        ),
        32,
    )
    frames = (
        (5,)
        if "3D" in type(model).__name__
        or re.search("Video|Wan|Mochi|LTX|Cosmos|CogVideo|Allegro|Magvit", type(model).__name__)
        else ()
    )
    picture = lambda: torch.randn(BATCH, channels, *frames, side, side)  # noqa: E731
    made = {
        "sample": picture,
        "hidden_states": picture,
        "x": picture,
        "timestep": lambda: torch.randint(1, 1000, (BATCH,)),
        "encoder_hidden_states": lambda: torch.randn(BATCH, 7, text),
        "class_labels": lambda: torch.randint(0, 4, (BATCH,)),
        "pooled_projections": lambda: torch.randn(BATCH, config.pooled_projection_dim),
    }
    return {
        n: made[n]()
        for n, p in names.items()
        if n in made
        and (
            p.default is inspect.Parameter.empty
            or n == "class_labels"
            and getattr(config, "num_embeds_ada_norm", None)
        )
    }


LIBRARIES: dict[str, tuple[Callable[[], list[str]], Callable[[str], Built]]] = {
    "transformers": (transformers_names, transformers_model),
    "timm": (timm_names, timm_model),
    "torchvision": (torchvision_names, torchvision_model),
    "diffusers": (diffusers_names, diffusers_model),
}

# ------------------------------------------------------------------------------------- comparisons


def tensors(tree) -> list[Tensor]:
    """Tensors of a result, those in caches too."""
    return [t for t in pytree.tree_leaves(opened(tree)) if isinstance(t, Tensor)]


class ReadsSingle(TorchDispatchMode):
    """Notes whether a model computes anything in float32 or less."""

    found = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if isinstance(t, Tensor) and t.dtype in (torch.float32, torch.bfloat16, torch.float16):
                self.found = self.found or t.numel() > 1
        return out


def doubled(tree):
    return pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, tree)


def eager(model: nn.Module, kwargs: dict) -> tuple[list[Tensor], list[Tensor | None]]:
    outs = tensors(model(**kwargs))
    used = [t for t in outs if t.requires_grad]
    wanted = [p for p in model.parameters() if p.requires_grad]
    if not used:
        return outs, []
    return outs, list(torch.autograd.grad(sum(t.sum() for t in used), wanted, allow_unused=True))


def rounding(model: nn.Module, kwargs: dict, want: tuple[list, list]) -> float:
    """Return how far results and gradients move if the weights move by float32's rounding."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1 + torch.finfo(torch.float32).eps * torch.randn_like(p))
    moved = 0.0
    for got, known in zip(eager(other, kwargs), want):
        pairs = [(g, w) for g, w in zip(got, known) if w is not None and w.is_floating_point()]
        scale = max((float(w.abs().max()) for _, w in pairs if w.numel()), default=1.0)
        changes = (float((g - w).abs().max()) for g, w in pairs if g.numel() and g.shape == w.shape)
        moved = max(moved, max(changes, default=0.0) / max(scale, 1e-30))
    return moved


def run_model(library: str, seed: int, name: str) -> dict[str, Any]:
    """The row of one model class."""
    row: dict[str, Any] = {"op": f"{library}:{name}", "samples": 1}
    torch.manual_seed(0)
    try:
        model, kwargs = LIBRARIES[library][1](name)
        model.eval()
        row["parameters"] = sum(p.numel() for p in model.parameters())
        if row["parameters"] > 3e7:
            raise MemoryError(f"{row['parameters']:,} parameters: not small")
        try:
            double = copy.deepcopy(model).double()
            with ReadsSingle() as single:
                want = eager(copy.deepcopy(double), doubled(kwargs))
            model, kwargs, exact = double, doubled(kwargs), SINGLE if single.found else EXACT
        except Exception:  # noqa: BLE001 (a model that computes in float32 somewhere)
            want, exact = eager(copy.deepcopy(model), kwargs), SINGLE
        again = eager(copy.deepcopy(model), kwargs)
        if differs(again[0], want[0], exact):
            raise RuntimeError("random: two runs differ")
        if not any(t.isfinite().any() for t in want[0] if t.is_floating_point()):
            raise RuntimeError("no result is finite: nothing could differ")
    except Exception as error:  # noqa: BLE001 (one device cannot run it)
        return {**row, "what": "not built", "why": failure(error)}
    row["double"] = exact == EXACT
    if exact == SINGLE:
        exact = max(exact, 4 * rounding(model, kwargs, want))
    rng = random.Random(zlib.crc32(f"{name} {seed}".encode()))
    marks = {
        n: random_spec(rng, p.shape, MESH.names)
        for n, p in model.named_parameters(remove_duplicate=True)
    }
    start = time.process_time()
    try:
        gspmd.annotate(model, MESH, marks)
        plan = gspmd.plan(model, mesh=MESH, grad=bool(want[1]), **kwargs)
        row["planning"] = round(time.process_time() - start, 2)
        row["capture"] = round(plan.seconds["capture"], 2)
        row["sent"] = plan.sent_bytes
        row["replicated"] = sorted(
            {r.op for r in plan.replicated_ops if r.why.startswith("no rule")}
        )
        got = plan.simulate(_poison=True, **kwargs)
        outs, grads = got if want[1] else (got, {})
        names = [n for n, p in model.named_parameters() if p.requires_grad]
        pairs = [(grads[n], w) for n, w in zip(names, want[1]) if w is not None and n in grads]
        missing = [n for n, w in zip(names, want[1]) if w is not None and n not in grads]
        largest = max((float(w.abs().max()) for _, w in pairs if w.numel()), default=0.0) or 1.0
        why = differs(tensors(outs), want[0], exact) or differs(  # a gradient may be but rounding
            [g / largest for g, _ in pairs], [w / largest for _, w in pairs], exact
        )
        if why or missing:
            return {**row, "what": "wrong", "why": why or f"no gradient of {missing[:3]}"}
    except ShardingError as error:
        return {**row, "what": "refused", "why": str(error).strip()[:600]}
    except Exception as error:  # noqa: BLE001 (whatever it is, it is a row)
        return {**row, "what": "error", "why": failure(error)}
    return {**row, "what": "right"}


def table(rows: list[dict]) -> Iterator[str]:
    """Yield the counts of each library, and each class that is not right."""
    for library in LIBRARIES:
        own = [r for r in rows if r["op"].startswith(f"{library}:")]
        counts = Counter(r.get("what", "error") for r in own)
        if own:
            built = len(own) - counts["not built"]
            others = (f", {n} {what}" for what, n in sorted(counts.items()) if what != "right")
            yield f"{library}: {counts['right']} of {built} right{''.join(others)}"
    order = ["wrong", "error", "refused", "not built"]
    for row in sorted(rows, key=lambda r: (order + ["right"]).index(r.get("what", "error"))):
        if row.get("what") != "right":
            why = row.get("why") or str(row.get("failures", ""))
            yield f"{row.get('what', 'error'):10s}{row['op']}: {why.splitlines()[0] if why else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", choices=LIBRARIES, default="transformers")
    parser.add_argument("--part", default="0/1", help="i/n: each n-th class, from the i-th")
    parser.add_argument("--only", action="append", help="a model class; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120, help="limit for a class")
    parser.add_argument("--json", type=Path, help="file of rows, which is continued")
    parser.add_argument("--table", type=Path, help="print a file of rows, and run nothing")
    given = parser.parse_args()
    if given.table:
        print(*table(json.loads(given.table.read_text())), sep="\n")
        return
    warnings.simplefilter("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass
    except RuntimeError:
        without_cuda_ops()
    rows = json.loads(given.json.read_text()) if given.json and given.json.exists() else []
    known = {r["op"] for r in rows}
    index, parts = map(int, given.part.split("/"))
    names = given.only or LIBRARIES[given.library][0]()[index::parts]
    names = [n for n in names if f"{given.library}:{n}" not in known]
    run = partial(run_model, given.library, given.seed)
    for row in Pool(run, given.jobs, given.seconds).run(names):
        if ":" not in row["op"]:  # it crashed, or took too long
            row |= {"op": f"{given.library}:{row['op']}", "what": "error"}
            row["why"] = row.get("skipped") or row["failures"][0]["raises"]
        rows.append(row)
        print(f"{row['what']:10s}{row['op']}: {row.get('why', '')[:160]!r}", flush=True)
        if given.json:
            given.json.write_text(json.dumps(rows, indent=1))
    print(*list(table(rows))[:1], sep="\n")


if __name__ == "__main__":
    main()
