"""The wheel and the sdist: contents, a run in an empty environment, types. No network is used."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path
from shutil import copytree

import pytest

import torchgspmd as gspmd

ROOT = Path(__file__).resolve().parents[2]
USER = Path(__file__).parent / "typed_user.py"
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in")
BUILD = "from setuptools import build_meta; build_meta.build_sdist('dist')"


def run(*command: object, folder: Path) -> str:
    """Run a command that sees no package but those of its own interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments: object, folder: Path) -> None:
    run(sys.executable, "-m", "pip", "-q", *arguments, folder=folder)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("tree")
    for name in FILES:
        (tree / name).write_bytes((ROOT / name).read_bytes())
    for folder in ("torchgspmd", "tests/wheel"):  # setuptools looks for tests
        copytree(ROOT / folder, tree / folder)
    run(sys.executable, "-c", BUILD, folder=tree)
    return next((tree / "dist").glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    pip("wheel", "--no-build-isolation", "--no-deps", "-w", ".", sdist, folder=sdist.parent)
    return next(sdist.parent.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with the wheel and its requirements alone.

    The requirements are those of this environment, which a .pth file names: a path in such a file
    brings no .pth files of its own, so the package that is under test stays invisible.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    executable = folder / "bin" / "python"
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    pip("--python", executable, "install", "--no-index", "--no-deps", wheel, folder=folder)
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return executable


def is_of_tests(names: Iterable[str]) -> list[str]:
    return [name for name in names if re.search(r"(^|/)(tests?|tests_\w+|examples)/|\btest_", name)]


def test_the_wheel_has_the_package_and_nothing_of_the_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        metadata = next(n for n in file.namelist() if n.endswith("METADATA"))
        text = file.read(metadata).decode()
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "torchgspmd").rglob("*.py")}
    data = {"torchgspmd/py.typed", "torchgspmd/tools/report/page.html"}
    models = (ROOT / "torchgspmd/tools/decoders/models").glob("*.json")
    data |= {str(path.relative_to(ROOT)) for path in models}
    assert names == sources | data
    assert f"Version: {gspmd.__version__}\n" in text
    assert "Requires-Dist: torch>=2.9\n" in text and "License-Expression: BSD-3-Clause\n" in text


def test_the_sdist_has_no_tests(sdist: Path) -> None:
    with tarfile.open(sdist) as file:
        names = [name.partition("/")[2] for name in file.getnames()]
    assert set(FILES) <= set(names) and "torchgspmd/py.typed" in names
    assert is_of_tests(names) == []


def test_the_example_of_the_readme_runs_from_the_wheel(python: Path, tmp_path: Path) -> None:
    found = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    code = next(body for kind, body in found if kind == "python")
    shown = next(body for kind, body in found if kind == "text")
    (tmp_path / "readme.py").write_text(code + "\nprint(gspmd.__file__)\n")
    *printed, place = run(python, "readme.py", folder=tmp_path).splitlines()
    assert place.startswith(str(python.parents[1]))
    assert "\n".join(printed).strip() == shown.strip()


def test_a_file_of_a_user_has_the_types_of_all_public_names(python: Path, tmp_path: Path) -> None:
    source = USER.read_text()
    assert {n for n in gspmd.NAMES if not re.search(rf"gspmd\.{n}\b", source)} == set()
    (tmp_path / "user.py").write_text(source)
    pyright = Path(sys.executable).with_name("pyright")
    assert "0 errors" in run(pyright, "--pythonpath", python, "user.py", folder=tmp_path)
