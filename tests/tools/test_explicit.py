"""`torchgspmd explicit`: exchanges are named in the source, and nothing else changes."""

import re
import runpy
from collections import Counter

import pytest
import torch

import torchgspmd as gspmd
from torchgspmd.tools.command_line import run

MODEL = '''
"""A model."""
import torch
from torch import nn
IMPORT

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        # äöü: columns count bytes
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return BODY


def example(mesh):
    marks = {"**.up.weight": "model _", "**.down.weight": "_ model", "blocks.*": "data _"}
    return NAME.annotate(Net(), mesh, marks), (torch.ones(2048, 64),)
'''
BODIES = {
    "x.square().mean()": True,
    "x.mul(2)\\\n            .sum() + 1": True,
    "(x * 2).sum(0).max(0)[0]": True,
}


def sent(plan):
    return Counter((c.kind, c.axes, c.dtype, c.sent_bytes, c.count) for c in plan.collectives)


def planned(path, **options):
    model, arguments = runpy.run_path(str(path))["example"](mesh := gspmd.Mesh(data=2, model=4))
    return model, gspmd.plan(model, *arguments, mesh=mesh, grad=True, **options)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("line", ["import torchgspmd as gs", "import torchgspmd"])
def test_names_are_written(body, line, tmp_path, capsys):
    path, name = tmp_path / "mine.py", line.split()[-1]
    text = MODEL.replace("IMPORT", line).replace("BODY", body).replace("NAME", name)
    path.write_text(text)
    before, plan = planned(path)
    with pytest.raises(gspmd.ShardingError, match="reshard"):
        planned(path, communication="explicit")
    assert run(["explicit", str(path), "--mesh", "data=2,model=4"]) == 0
    line = 'mine.py:14  %einsum_1  x 2: gspmd.reshard(..., "data _"), or "all_reduce model blocks'
    assert line in capsys.readouterr().out
    assert path.read_text() == text
    assert run(["explicit", str(path), "--mesh", "data=2,model=4", "--write"]) == 0
    assert "each exchange of the forward has a name" in capsys.readouterr().out
    assert [each.name for each in tmp_path.iterdir()] == ["mine.py"]
    after, explicit = planned(path, communication="explicit")
    assert sent(explicit) == sent(plan)
    after.load_state_dict(before.state_dict())
    x = torch.randn(16, 64)
    assert torch.equal(after(x), before(x))


def test_an_argument_is_named_by_hand(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\nimport torchgspmd as gspmd\n\n\ndef example(mesh):\n"
        "    def f(x, y):\n"
        '        x = gspmd.mark_sharding(x, mesh, "data _")\n'
        '        return gspmd.mark_sharding(x.clone(), mesh, "_ data") + y\n\n'
        "    return f, (torch.ones(8, 8), torch.ones(8, 8))\n"
    )
    assert run(["explicit", str(path), "--mesh", "data=2", "--write"]) == 0
    assert "1 left to name" in capsys.readouterr().out or "gspmd.reshard(" in path.read_text()


def test_stored_weights_have_rows(tmp_path, capsys):
    """A linear layer reads its own weight, so no line of the source can name its exchange."""
    path = tmp_path / "mine.py"
    text = MODEL.replace("IMPORT", "import torchgspmd as gs").replace("NAME", "gs")
    path.write_text(text.replace("BODY", "x.sum()").replace('"_ model", "', '"data model", "'))
    assert run(["explicit", str(path), "--mesh", "data=2,model=4", "--write"]) == 0
    out = capsys.readouterr().out
    rows = re.findall(r'^blocks\.\*\..* x 2: .* or "(.*)"$', out, re.M)
    assert f'communication=["named", "backward *", "{rows[0]}"]' in out.splitlines()[-1]
    assert rows == ["all_gather data blocks.*.down.weight"]
    with pytest.raises(gspmd.ShardingError) as error:
        planned(path, communication="explicit")
    assert f'communication=["named", "backward *", "{rows[0]}"]' in error.value.fix
    planned(path, communication=["named", "backward *", *rows])


def test_a_model_with_names_of_dimensions(tmp_path, capsys):
    """Lines have axes of the mesh, also where a layout translates names; losses are named whole."""
    path = tmp_path / "mine.py"
    marks = '"**.up.weight": "hidden _", "**.down.weight": "_ hidden", "blocks.*": "batch _"'
    text = MODEL.replace(
        "IMPORT", "import torchgspmd as gspmd\nfrom torch.nn import functional as F"
    )
    text = text.replace("BODY", "F.cross_entropy(x, x.argmax(-1))").split("def example")[0]
    path.write_text(
        text + "def example(mesh):\n"
        '    layout = gspmd.Layout({"hidden": "model", "batch": "data"}).on(mesh)\n'
        f"    model = gspmd.annotate(Net(), layout, {{{marks}}})\n"
        "    return model, (torch.ones(2048, 64),)\n"
    )
    _, plan = planned(path)
    assert run(["explicit", str(path), "--mesh", "data=2,model=4", "--write"]) == 0
    assert "each exchange of the forward has a name" in capsys.readouterr().out
    assert 'reshard(self.down(torch.relu(self.up(self.norm(x)))), "data _")' in path.read_text()
    assert sent(planned(path, communication="explicit")[1]) == sent(plan)
