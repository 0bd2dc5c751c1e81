"""Models of diffusers, made small by one function."""

from __future__ import annotations

import importlib
import inspect
import math
import re
import time
import traceback
from collections.abc import Generator, Iterator
from typing import Any

import torch
from diffusers_inputs import inputs
from message_repairs import resized_by
from narrow_models import LARGEST, Built, narrowed
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

DIFFUSERS = r"(Transformer\w*Model|UNet\w*Model|Autoencoder\w+|VQModel|ControlNetModel|\w+DModel)$"


def diffusers_names() -> list[str]:
    diffusers = importlib.import_module("diffusers")
    return sorted(  # one of several models is not a model of its own
        n for n in dir(diffusers) if re.match(r"\w*?" + DIFFUSERS, n) and "Multi" not in n
    )


FEWER = [  # names of a constructor's arguments, and their largest value
    (r"max_text_seq_length|^text_len", 7),
    (r"^sample_(width|height)$|^(min_num_gist_tokens|gist_step|gist_min_text_len)$", 8),
    (r"num_\w*(layers|blocks)$|layers_per_block|depth$|^(n|mmdit)_\w*layers$", 1),
    (r"num_\w*heads|^n_(kv_)?heads", 2),
    (r"cross_attention_dim|joint_attention_dim|caption|text_.*dim|pooled", 32),
]
NARROWER = [  # these do not fit each other in each model
    (r"^((decoder_)?base|inner|hidden|ffn|model|time)?_?(dim|size)$", 32),
    (r"^(d_model|embed_dim|width|model_channels|ch)$", 32),
    (r"(intermediate|mlp|ffn?|ff|ff_inner)_(size|dim|width)$", 64),
    (r"^((base|model|encoder|decoder)_)?channels$|channels_base$", 32),
    (r"^(encoder|decoder|latent)_(dim|hidden_size)$|_hidden_dim$", 32),
]
NEEDED = [  # arguments without a default
    (r"block_out_channels", (32, 32)),
    (r"latent_channels", 4),
    (r"channels", 3),
    (r"sample_size", 32),
    (r"compression_ratio", 2),
    (r"layers", 1),
]
UNKNOWN = [  # arguments that are None: often needed, and where nothing else runs
    (r"in_channels|sample_size", 32),
    (r"patch_size", 2),
    (r"num_\w*(layers|heads)", 2),
    (r"\w*(channels|dim|dim_t5|size)", 32),
]
NUMBERS = [(r"\w*(layers|places|ids)\w*", [0]), (r"\w*(channels|dims?)", [32, 32])]
PART = 4  # of a head's width, and of the parts of it that rotate


def diffusers_arguments(cls, narrow: bool, divide: bool, fit: bool, fill: bool) -> dict[str, Any]:
    """A constructor's defaults, made small."""
    given: dict[str, Any] = {}
    parameters = inspect.signature(cls.__init__).parameters
    defaults = {key: parameter.default for key, parameter in parameters.items()}
    for key, value in defaults.items():
        if value is None:
            kind = str(parameters[key].annotation).lower()
            numbers = "list" in kind and "str" not in kind
            table = NUMBERS if numbers else UNKNOWN if fill else UNKNOWN[:1]
            given |= {key: v for p, v in table[::-1] if re.fullmatch(p, key)}  # noqa: B035 (the first)
        if value is inspect.Parameter.empty:
            given |= {key: v for p, v in NEEDED[::-1] if re.search(p, key)}  # noqa: B035 (the first)
        if type(value) is int and value > 0:
            table = [*FEWER, *(NARROWER if narrow else [])]
            most = next((most for pattern, most in table if re.search(pattern, key)), value)
            given[key] = min(value, most)
            if divide and re.search(r"head_dim$", key) and value % PART == 0:
                given[key] = value // PART
        elif isinstance(value, tuple | list) and value and all(type(v) is int for v in value):
            if "channels" in key:
                part = 1 if narrow else max(min(value) // 16, 1)  # else they keep their ratios
                given[key] = type(value)(min(v, 32) if narrow else v // part for v in value)
            elif "heads" in key:
                given[key] = type(value)(2 for _ in value)
            elif divide and re.search(r"axes_dims?|rope_dim|_section", key):
                given[key] = type(value)(v // PART for v in value)
            elif re.search(r"layers$|layer_ids$|places$", key) and value != sorted(set(value)):
                given[key] = type(value)(1 for _ in value)
            elif re.search(r"layers$|layer_ids$|places$", key):  # numbers of layers
                given[key] = type(value)([0])
            elif re.search(r"num_layers|depths$", key):
                given[key] = type(value)(1 for _ in value)
    factors = ("num_attention_heads", "attention_head_dim")
    if all(type(defaults.get(key)) is int for key in factors):
        whole, small = (math.prod(of[key] for key in factors) for of in (defaults, given))
        given |= {key: small for key, value in defaults.items() if value == whole > 1}
        if fill:  # defaults that do not fit each other
            given |= {key: small for key in ("hidden_size",) if key in defaults}
            given |= {
                k: small for k, v in defaults.items() if v is None and "cross" in k and "dim" in k
            }
    if fit:
        fit_axes({**defaults, **given}, given)
    return given


WIDTH = ("hidden_size", "dim", "inner_dim", "model_dim", "width")
HEADS = ("num_attention_heads", "num_heads", "n_heads")
HEAD = ("attention_head_dim", "head_dim")


def fit_axes(known: dict[str, Any], given: dict[str, Any]) -> None:
    """Make the parts of a head that rotate with each axis add up to its width."""

    def number(names: tuple[str, ...]) -> int | None:
        return next((known[n] for n in names if type(known.get(n)) is int), None)

    width, heads, head = number(WIDTH), number(HEADS), number(HEAD)
    head = head or (width // heads if width and heads else None)
    for key, value in known.items():
        if head and re.search(r"axes_dims?|rope_dim_list", key) and isinstance(value, tuple | list):
            part = head // (2 * len(value)) * 2
            given[key] = type(value)([head - part * (len(value) - 1), *[part] * (len(value) - 1)])


REDUCTIONS = (  # narrow, divide heads, fit axes, fill None, divide the layers' widths
    (True, True, True, False, 1), (True, True, False, False, 1), (False, True, True, False, 1),
    (False, True, False, False, 1), (True, False, True, False, 1), (True, True, True, True, 1),
    (False, False, False, False, 1), (True, True, True, False, 8), (False, False, False, False, 8),
)  # fmt: skip
SEARCH, MOST = 3, 15  # CPU seconds, after which no more arguments of a model, of any are tried


def line_of(error: Exception, cls: type[nn.Module]) -> int:
    """Return the line of a class's forward that an error comes from."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = inspect.unwrap(cls.forward).__code__
    return max((line for code, line in frames if code is own), default=0)


def leaves(kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in kwargs.items():
        yield from ((name, v) for v in (value if isinstance(value, list) else [value]))


UNPACKED = "values to unpack (expected"


def calls(model: nn.Module) -> Generator[dict[str, Any], Exception, None]:
    """Yield arguments to try. Receive the failure of a call, and yield the sizes that it names."""
    refused: set[int] = set()  # numbers of dimensions
    tried: set[str] = set()
    end = time.process_time() + SEARCH
    for kwargs in inputs(model):
        first = next(iter(kwargs.values()), None)
        first = first[0] if isinstance(first, list) and first else first
        dims = first.dim() if isinstance(first, Tensor) else 0
        attempt: dict[str, Any] | None = kwargs
        for _ in range(4):
            if attempt is None or dims in refused:
                break
            kind = str(
                [(n, getattr(v, "shape", 0), getattr(v, "dtype", 0)) for n, v in attempt.items()]
            )
            if kind in tried:
                break
            tried.add(kind)
            if time.process_time() > end:
                return
            failed = str((yield attempt))
            if UNPACKED in failed and f"got {dims})" in failed:
                refused.add(dims)
            if "got float" in failed:  # a sum of a mask is a size
                attempt = {n: v.long() if "mask" in n else v for n, v in attempt.items()}
            else:
                attempt = resized_by(attempt, failed)


def diffusers_model(name: str) -> Built:
    """The narrowest that runs of a constructor's defaults made small."""
    diffusers = importlib.import_module("diffusers")
    cls, furthest = getattr(diffusers, name), ((-1, -1), TypeError("no arguments"))
    done: list[nn.Module] = []  # layers that have run
    end = time.process_time() + MOST
    for narrow, divide, fit, fill, by in REDUCTIONS:
        if time.process_time() > end:
            break
        try:
            given = diffusers_arguments(cls, narrow, divide, fit, fill)
            with torch.device("meta"), narrowed(by):
                size = sum(p.numel() for p in cls(**given).parameters())
            if size > LARGEST:
                raise MemoryError(f"{size:,} parameters: not small")
            with narrowed(by):
                model = cls(**given).eval()
        except Exception as failed:  # noqa: BLE001 (other sizes may fit)
            furthest = max(furthest, ((-1, 0), failed), key=lambda f: f[0])
            continue
        trials = calls(model)
        kwargs = next(trials, None)
        while kwargs is not None:
            done.clear()
            hook = register_module_forward_hook(lambda layer, *_: done.append(layer))
            try:
                with torch.no_grad():  # else weights of a weight norm could not be copied
                    model(**kwargs)
                return model, kwargs
            except Exception as failed:  # noqa: BLE001 (other arguments may fit)
                far = len(done), line_of(failed, type(model))
                furthest = max(furthest, (far, failed), key=lambda f: f[0])
                why = failed
            finally:
                hook.remove()
            try:
                kwargs = trials.send(why)
            except StopIteration:
                break
    raise furthest[1]
