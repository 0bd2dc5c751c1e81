"""A proposal as a whole training script, for torchrun.

    torchrun --nproc-per-node=8 train.py

The script makes the model as it was made here: by the function that was passed, or by its class,
with arguments that its attributes have. The batch is random, with the shapes that were given; a
loader takes its place.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...capture import OUTPUT, Captured
from ...capture.state.object_trees import closed
from ...compat.private_apis import _pytree as pytree
from ...layout.prefix_specs import argument_names

SCRIPT = '''\
"""Run it: torchrun --nproc-per-node={devices} train.py"""
import os
{imports}
import torch
import torch.distributed as dist
import torchgspmd as gspmd

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()
torch.manual_seed(0)  # the same weights and batches on every rank
model = {model}.to(device)
{proposal}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def load():
    """Return a global batch, the same on every rank: put your loader here."""
    return {batch}


for step in range(10):
    batch = load()
{step}
    optimizer.step()
    optimizer.zero_grad()
    number = loss.item()  # on all ranks: their shards may have parts of it
    if dist.get_rank() == 0:
        print(f"step {{step}}: loss {{number:.4f}}", flush=True)
dist.destroy_process_group()
'''
LABELS, YOURS = "labels", "  # your loss"
WHOLE = """\
    loss = LOSS
    loss.backward()"""
DIVIDED = """\
    for rows in zip(*(each.chunk(COUNT) for each in batch)):
        loss = LOSS
        (loss / COUNT).backward()"""


@dataclass
class CodeNames:
    """The imports that the written code needs."""

    lines: dict[str, None] = field(default_factory=dict)

    def of(self, kind: type | Callable) -> str:
        """Name a class or a function in code, and import it.

        Raises:
            ValueError: It has no name in its module.
        """
        module, name = kind.__module__, kind.__qualname__
        if module == "builtins":
            return name
        if "<" in name:  # a lambda, or a function in another
            raise ValueError(f"{name} cannot be imported")
        if getattr(nn, name, None) is kind:
            self.lines["from torch import nn"] = None
            return f"nn.{name}"
        file = getattr(sys.modules.get(module), "__file__", None)
        if module == "__main__" or module not in sys.modules:  # a script: it has to be imported
            with suppress(TypeError, OSError):  # typed into a notebook: no file has it
                file = file or inspect.getsourcefile(kind)
            file = file or "model.py"
            module = Path(file).stem
        self.lines[f"from {module} import {name.partition('.')[0]}"] = None
        return name

    def code(self, value: Any) -> str:
        """Return code that makes a value.

        Raises:
            ValueError: No code is known.
        """
        if isinstance(value, (bool, int, float, str, type(None), torch.dtype)):
            return repr(value)
        if isinstance(value, Tensor):
            # Code that makes a tensor like this one, with random values.
            shape, dtype = tuple(value.shape), value.dtype
            if dtype.is_floating_point or dtype.is_complex:
                return f"torch.randn({shape}, dtype={dtype}, device=device)"
            if dtype == torch.bool:
                # A mask that lets everything through.
                return f"torch.ones({shape}, dtype={dtype}, device=device)"
            # At most the largest given value: a token has to be in the vocabulary.
            most = 2 if value.is_meta or not value.numel() else max(int(value.max()) + 1, 2)
            return f"torch.randint({most}, {shape}, dtype={dtype}, device=device)"
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            parts = ", ".join(map(self.code, value))
            comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
            return f"[{parts}]" if isinstance(value, list) else f"({parts}{comma})"
        if isinstance(value, dict) and type(value) in (dict, OrderedDict):
            return "{" + ", ".join(f"{k!r}: {self.code(v)}" for k, v in value.items()) + "}"
        if not isinstance(value, type) and is_dataclass(value):
            given = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
            plain = {f.name: f.default for f in fields(value)}
            plain |= {
                f.name: f.default_factory() for f in fields(value) if callable(f.default_factory)
            }
            # Tensors and the like are no defaults.
            given = {
                k: v for k, v in given.items() if type(v) is not type(plain[k]) or v != plain[k]
            }
            return self._call(type(value), [], _without_derived(value, given))
        if isinstance(value, nn.Module):
            return self._module(value)
        raise ValueError(f"no code makes a {type(value).__name__}")

    def _call(self, kind: type, args: Sequence[str], kwargs: Mapping[str, object]) -> str:
        parts = [*args, *(f"{name}={self.code(value)}" for name, value in kwargs.items())]
        return f"{self.of(kind)}({', '.join(parts)})"

    def _module(self, module: nn.Module) -> str:
        """Return a call to a module's class, with the attributes that its parameters name."""
        children = list(module.children())
        if type(module) in (nn.Sequential, nn.ModuleList):
            listed = [self.code(child) for child in children]
            as_list = [f"[{', '.join(listed)}]"]
            return self._call(
                type(module), listed if type(module) is nn.Sequential else as_list, {}
            )
        given, missing = dict[str, object](), object()
        # Most modules keep their constructor's arguments as attributes with the same names.
        for name, parameter in inspect.signature(type(module)).parameters.items():
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            value, default = getattr(module, name, missing), parameter.default
            if isinstance(default, bool) and value is not missing and not isinstance(value, bool):
                value = value is not None  # nn.Linear(bias=True) has a parameter of that name
            if value is missing or isinstance(value, Tensor):
                if default is parameter.empty:
                    raise ValueError(f"{type(module).__name__} takes {name}")
            elif default is parameter.empty or value is not default and value != default:
                given[name] = value
        return self._call(type(module), [], given)


@dataclass(frozen=True)
class ScriptSource:
    """Code that makes a model and calls it.

    step: the loss as code. missing: why no code makes the model.
    """

    imports: tuple[str, ...]
    model: str
    batch: str
    step: str
    missing: str = ""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        captured: Captured,
        builder: Callable[[], nn.Module] | None = None,
    ) -> ScriptSource:
        """Write code for a model, for its arguments and for a loss. builder: makes the model."""
        names, missing = CodeNames(), ""
        try:
            made = f"{names.of(builder)}()" if builder else names.code(model)
            missing = "" if builder or _is_like(made, model) else "its class makes another model"
        except Exception as error:  # whatever a constructor raises
            made, missing = "", f"{type(error).__name__}: {error}".partition("\n")[0]
        if missing:
            name = type(model).__name__
            with suppress(ValueError):  # a class in a function
                name = names.of(type(model))
            # The user completes this call; the script says why.
            made = f"{name}(...)"
        batch, call = CodeNames().code(tuple(args)), "model(*ROWS"
        if kwargs:
            call += ", **options"
            batch = f"{batch}, {CodeNames().code(dict(kwargs))}"
        loss = loss_code(f"{call})", captured)
        lacks = {*inspect.signature(model.forward).parameters} - {*argument_names(model, args)}
        if loss.endswith(YOURS) and LABELS in lacks - {*kwargs}:
            loss += f"; with {LABELS} among the arguments of suggest, the model's own"
        if "tree_leaves" in loss:
            names.lines["from torch.utils._pytree import tree_leaves"] = None
        return cls(tuple(names.lines), made, batch, loss, missing)

    def script(self, proposal: str, devices: int, calls: int) -> str:
        """Return the script. proposal: the code from mesh to parallelize. calls: in a step."""
        step = DIVIDED.replace("COUNT", str(calls)) if calls > 1 else WHOLE
        rows = "rows" if calls > 1 else "batch"
        step = step.replace("LOSS", self.step.replace("ROWS", rows), 1)
        text = SCRIPT.format(
            devices=devices,
            imports="\n".join(self.imports),
            model=self.model,
            proposal=proposal,
            batch=self.batch,
            step=step,
        )
        if "**options" in self.step:
            text = text.replace("    batch = load()", "    batch, options = load()")
        if self.missing:
            text = text.replace(
                "model = ", f"# Write how your model is made ({self.missing}).\nmodel = ", 1
            )
        return text


def _is_like(code: str, model: nn.Module) -> bool:
    classes: dict[str, type] = {type(m).__name__: type(m) for m in model.modules()}
    # Arguments may be objects, too, such as a dataclass with the configuration.
    values = [value for module in model.modules() for value in vars(module).values()]
    classes |= {type(value).__name__: type(value) for value in values}
    with torch.device("meta"):
        # On the meta device, so that no weight is allocated.
        made = eval(code, {"torch": torch, "nn": nn, **classes})
    state = [
        {name: (t.shape, t.dtype) for name, t in (*m.named_parameters(), *m.named_buffers())}
        for m in (made, model)
    ]
    return state[0] == state[1]


def returned(captured: Captured) -> list[Tensor]:
    results: Any = captured.graph.output_node().args[0]
    return [
        node.meta["val"]
        for node, out in zip(results, captured.outputs)
        if out.kind == OUTPUT and node is not None
    ]


def loss_code(call: str, captured: Captured) -> str:
    """Return a call's loss as code: the result named loss, else the first scalar.

    Without both it is a mean of squares, for the user to replace.
    """
    leaves, values = list(captured.result_leaves), returned(captured)
    for slot, value in zip(captured.result_slots, values):
        leaves[slot] = value
    result = pytree.tree_unflatten(leaves, captured.results)
    parts = [*_parts(closed(result, ((), {})) if captured.opened else result)]
    named = [(path, value) for path, value in parts if re.search(r"\bloss\b\W*$", path)]
    scalars = [(path, value) for path, value in parts if not value.dim()]
    for path, value in [*named, *scalars]:
        if value.is_floating_point():
            return f"{call}{path}" + ".mean()" * bool(value.dim())
    if captured.results.num_leaves == 1 and len(values) >= 1:
        return f"{call}.float().square().mean(){YOURS}"
    return f"sum(x.float().square().mean() for x in tree_leaves({call})){YOURS}"


def _parts(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield a result's tensors, each with the code that leads to it."""
    if isinstance(value, Tensor):
        yield path, value
        return
    if isinstance(value, Mapping) and not is_dataclass(value):
        parts = [(f"[{name!r}]".replace("'", '"'), part) for name, part in value.items()]
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None)  # of a named tuple
        parts = [(f".{names[i]}" if names else f"[{i}]", part) for i, part in enumerate(value)]
    else:
        parts = [(f".{name}", part) for name, part in getattr(value, "__dict__", {}).items()]
    for step, part in parts:
        yield from _parts(part, path + step)


def _without_derived(value: object, given: Mapping[str, object]) -> Mapping[str, object]:
    """Return a dataclass's arguments without those that its constructor computes by itself."""
    for name in given:
        rest = {k: v for k, v in given.items() if k != name}
        with suppress(Exception):  # whatever a constructor raises
            if type(value)(**rest) == value:
                return _without_derived(value, rest)
    return given
