"""The scripts of docs/frameworks.md run on the processes of their meshes."""

import re
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from ranks import distributed
from tiny import shared_folder

import torchgspmd
from torchgspmd.integrations import VERSIONS

PAGE = Path(torchgspmd.__file__).parents[1] / "docs" / "frameworks.md"
SCRIPT = re.compile(r"^## (.*?)\n.*?<!-- run: (\S+) -->\n```py\n(.*?)^```", re.M | re.S)
SCRIPTS = SCRIPT.findall(PAGE.read_text())


@distributed()
def run(mesh, code):
    AcceleratorState._reset_state(reset_partial_state=True)  # of the test before
    exec(compile(code, str(PAGE), "exec"), {"__name__": "script", "output_dir": shared_folder()})


@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("title, mesh, code", SCRIPTS, ids=[title for title, *_ in SCRIPTS])
def test_the_script_runs(title, mesh, code):
    run(mesh, code=code)


def test_the_page_has_the_versions():
    table = dict(re.findall(r"^\| (\w+) \| ([\d.]+) \|", PAGE.read_text(), re.M))
    assert table == VERSIONS
