"""The script of a proposal runs on processes as it stands, and trains as one device does."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchgspmd as gspmd
from torchgspmd.capture import capture
from torchgspmd.tools.suggest.judge import ONE_DEVICE
from torchgspmd.tools.suggest.script import CodeNames, ScriptSource

ROOT = Path(__file__).resolve().parents[3]
NET = """
from dataclasses import dataclass
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    words: int = 16
    width: int = 8


class Net(nn.Module):
    def __init__(self, config, depth=1, dropout=True):
        super().__init__()
        self.config, self.depth = config, depth
        self.table = nn.Embedding(config.words, config.width)
        self.layers = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(depth))
        self.head = nn.Linear(config.width, config.words)

    def forward(self, tokens, scale=1.0):
        h = self.table(tokens)
        for layer in self.layers:
            h = h + layer(h).relu()
        return F.cross_entropy(self.head(h).flatten(0, 1), tokens.flatten()) * scale
"""
RUN = """
import runpy
from dataclasses import replace
import torch, torchgspmd as gspmd
import net


def run(file):
    return runpy.run_path(file)["loss"].item()


if __name__ == "__main__":
    from torchgspmd.tools.suggest.proposal import Savings

    model, tokens = net.Net(net.Config(width=12), depth=2), torch.arange(16).view(4, 4)
    found = gspmd.suggest(
        model, tokens, devices=2, seconds=2, kwargs={"scale": 2.0}, reduce_dtype=torch.float32
    )
    best = replace(found[0], marks={"table.weight": "_ model", "head.weight": "model _"},
                   mesh=gspmd.Mesh(data=1, model=2))
    scripts = [best.script]
    plain = gspmd.suggest(model, tokens, devices=2, seconds=2)[0]
    for in_calls in (True, False):
        savings = Savings(microbatches=2, in_calls=in_calls)
        scripts.append(replace(plain, savings=savings).script)
    for script, scale, parts in zip(scripts, (2.0, 1.0, 1.0), (1, 2, 2)):
        with open("train.py", "w") as file:
            file.write(script)
        losses = gspmd.launch(run, 2, "train.py", backend=None)
        torch.manual_seed(0)
        plain = net.Net(net.Config(width=12), depth=2)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        for _ in range(10):
            batch = torch.randint(16, (4, 4))
            whole = plain(batch, scale=scale).detach()
            for rows in batch.chunk(parts):
                loss = plain(rows, scale=scale)
                (loss / parts).backward()
            loss = whole if script is scripts[2] else loss
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(torch.tensor(losses), loss.detach().expand(2))
    print(scripts[0])
"""


def test_scripts_run_and_train_as_one_device_does(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "run.py").write_text(RUN)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "run.py"]
    done = subprocess.run(run, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "from net import Config\nfrom net import Net\n" in done.stdout
    model = "Net(config=Config(width=12), depth=2).to(device)"
    assert f"model = {model}\n" in done.stdout
    assert "loss = model(*batch, **options)\n" in done.stdout


@dataclass
class Sizes:
    width: int = 4


class Unknown(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 3)

    def forward(self, x):
        return {"y": self.up(x), "n": x.sum(1)}


def test_code_of_models():
    layers = nn.Linear(4, 8, bias=False), nn.GELU("tanh"), nn.Dropout(0.2), nn.LayerNorm(8)
    assert CodeNames().code(nn.Sequential(*layers)) == (
        "nn.Sequential(nn.Linear(in_features=4, out_features=8, bias=False), "
        "nn.GELU(approximate='tanh'), nn.Dropout(p=0.2), nn.LayerNorm(normalized_shape=(8,)))"
    )
    names = CodeNames()
    assert names.code([Sizes(5), {"a": (None,)}]) == "[Sizes(width=5), {'a': (None,)}]"
    assert names.code(Sizes()) == "Sizes()"  # the defaults
    assert [line.split()[-1] for line in names.lines] == ["Sizes"]
    with pytest.raises(ValueError, match="no code makes a object"):
        CodeNames().code(object())


def test_a_model_without_code_says_so():
    model, x = Unknown(4), torch.zeros(2, 4)
    source = ScriptSource.of(model, (x,), {}, capture(model, (x,), {}, ONE_DEVICE))
    assert "Unknown takes width" in source.missing
    script = source.script("", 2, 1)
    assert "# Write how your model is made (ValueError: Unknown takes width).\n" in script
    assert "model = Unknown(...).to(device)\n" in script
    assert "loss = sum(x.float().square().mean() for x in tree_leaves(model(*batch)))" in script
    assert "from torch.utils._pytree import tree_leaves\n" in script


def test_the_bound_is_defined_at_the_precision_used():
    model, x = nn.Linear(64, 64), torch.empty(4096, 64)
    texts = {}
    for dtype in (torch.float32, torch.bfloat16):
        found = gspmd.suggest(model, x, devices=2, seconds=1, param_dtype=dtype)[0]
        rate = gspmd.Hardware.of("h100").rate(dtype.itemsize)
        operations = 2 * 2 * 4096 * 64 * 64 / 2  # forward, and the gradient of the weight
        assert found.bound == pytest.approx(operations / (0.7 * rate))
        texts[dtype] = str(found)
    assert "of 67 TFLOP/s, divided evenly over 2 devices" in texts[torch.float32]
    assert "\nbound " in texts[torch.bfloat16] and " of the bound" in texts[torch.bfloat16]
    assert "in bf16 at 70% of 989 TFLOP/s" in texts[torch.bfloat16]


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor


torch.utils._pytree.register_dataclass(Output)


class Named(NamedTuple):
    states: list
    total: torch.Tensor


class Plain:
    """An object that holds tensors, which no pytree knows."""

    def __init__(self, logits, loss):
        self.logits, self.loss = logits, loss


RESULTS = {  # what forward returns of logits and a loss -> the loss in code
    "model(*batch)": lambda logits, loss: loss,
    "model(*batch)[1]": lambda logits, loss: (logits, loss),
    "model(*batch)[0]": lambda logits, loss: [loss, logits, loss * 2],
    "model(*batch).loss": lambda logits, loss: Output(logits, loss),
    'model(*batch)["loss"]': lambda logits, loss: {"norm": loss * 2, "loss": loss},
    'model(*batch)["loss"].mean()': lambda logits, loss: {"loss": logits},
    'model(*batch)["parts"][0]': lambda logits, loss: {"logits": logits, "parts": (loss,)},
    "model(*batch).total": lambda logits, loss: Named([logits], loss),
    "model(*batch).loss ": lambda logits, loss: Plain(logits, loss),
    "model(*batch)[1] ": lambda logits, loss: (logits.argmax(), loss),
    "model(*batch).float().square().mean()  # your loss": lambda logits, loss: logits,
}


class Returning(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.up, self.result = nn.Linear(4, 3), result

    def forward(self, x, labels):
        logits = self.up(x)
        return self.result(logits, F.cross_entropy(logits, labels))


@pytest.mark.parametrize("code", RESULTS)
def test_the_loss_that_a_model_returns_is_trained(code):
    model = Returning(RESULTS[code])
    batch = torch.zeros(2, 4), torch.zeros(2, dtype=torch.long)
    source = ScriptSource.of(model, batch, {}, capture(model, batch, {}, ONE_DEVICE))
    script = source.script("", 2, 1)
    assert f"    loss = {code.strip()}\n    loss.backward()\n" in script
    # The code is right: it gives the loss.
    found = eval(code.partition("  #")[0], {"model": model, "batch": batch})
    assert found.dim() == 0
    if "mean" not in code:
        torch.testing.assert_close(found, F.cross_entropy(model.up(batch[0]), batch[1]))


class Tagged(nn.Linear):
    def forward(self, x, labels=None):
        y = super().forward(x)
        return y if labels is None else {"loss": F.cross_entropy(y, labels), "logits": y}


def test_a_model_that_takes_labels_is_trained_by_them():
    model, x = Tagged(4, 3), torch.zeros(2, 4)
    lines = {}
    for kwargs in ({}, {"labels": torch.zeros(2, dtype=torch.long)}):
        captured = capture(model, (x,), kwargs, ONE_DEVICE)
        source = ScriptSource.of(model, (x,), kwargs, captured)
        lines[len(kwargs)] = source.script("", 2, 1).partition("    loss = ")[2].split("\n")[0]
    assert lines[0].endswith(
        "# your loss; with labels among the arguments of suggest, the model's own"
    )
    assert lines[1] == 'model(*batch, **options)["loss"]'


@dataclass
class Derived:
    width: int = 4
    heads: int = 2
    head_width: int | None = None
    names: dict | None = None

    def __post_init__(self):
        self.head_width = self.head_width or self.width // self.heads
        self.names = self.names or {0: "LABEL_0"}


def test_a_configuration_has_no_arguments_that_its_class_computes():
    assert CodeNames().code(Derived(8)) == "Derived(width=8)"
    assert CodeNames().code(Derived(8, head_width=2)) == "Derived(width=8, head_width=2)"


def test_a_search_tells_its_progress(monkeypatch, capfd):
    monkeypatch.setattr(sys.modules["torchgspmd.tools.suggest"], "TELL", 0.01)
    model, x = nn.Linear(64, 64, device="meta"), torch.empty(64, 64, device="meta")
    best = gspmd.suggest(model, x, devices=2, seconds=2)[0]
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("torchgspmd: suggest: 0 s, ")
    told = re.fullmatch(r"torchgspmd: suggest: \d+ s, \d+ plans; best: (.*)", lines[-1])
    assert told and told[1].startswith(f"{best.mesh}, ")


def build():
    return Returning(RESULTS["model(*batch).loss"])


def test_a_function_that_makes_the_model_is_imported():
    with torch.device("meta"):
        batch = torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)
    found = gspmd.suggest(build, batch, devices=2, seconds=1)[0]
    assert f"from {build.__module__} import build\n" in found.script
    assert "model = build().to(device)\n" in found.script
    # Logits stay where they are, as the numbers assume.
    assert 'out_specs="same"' in found.script and "out_specs" not in suggested_loss().script
    nameless = gspmd.suggest(lambda: build(), batch, devices=2, seconds=1)[0]
    assert "<lambda> cannot be imported" in nameless.script


def suggested_loss():
    model = Returning(RESULTS["model(*batch)"])
    batch = torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)
    return gspmd.suggest(model, batch, devices=2, seconds=1)[0]


def test_the_numbers_are_those_of_the_script():
    """The plan with the script's options sends the bytes in the header."""
    with torch.device("meta"):
        batch = torch.zeros(512, 4), torch.zeros(512, dtype=torch.long)
    found = gspmd.suggest(build, batch, devices=4, seconds=5)[0]
    model, options = build(), {}
    names = {"gspmd": gspmd, "model": model, "keep": lambda *a, **given: options.update(given)}
    exec(found.code.replace("gspmd.parallelize(", "keep("), names)
    plan = gspmd.plan(
        model, *batch, mesh=found.mesh, grad=True, advanced={"unmarked": "replicated"}, **options
    )
    assert plan.sent_bytes == pytest.approx(found.sent_bytes)


def test_a_class_without_a_file():
    """As typed into a notebook: its script imports it from a file to be written."""
    names = {"__name__": "notebook"}
    exec(NET, names)
    model, tokens = names["Net"](names["Config"]()), torch.zeros(4, 3, dtype=torch.long)
    source = ScriptSource.of(model, (tokens,), {}, capture(model, (tokens,), {}, ONE_DEVICE))
    assert not source.missing and source.imports == (
        "from model import Config",
        "from model import Net",
    )
