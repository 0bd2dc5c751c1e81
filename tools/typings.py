"""Write the types of torch as pyright shall see them: torch's own, and fx of tools/typings.

build/typings/torch has copies of the installed sources but for torch/fx, where an operand of a
node is Any. Torch annotates it as a union of 19 types; which one it is, the operator's schema says.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUBS = ROOT / "tools" / "typings" / "fx"
TARGET = ROOT / "build" / "typings" / "torch"


def without_types(folder: str, names: list[str]) -> set[str]:
    """Return the entries of a folder that are neither folders nor sources."""
    return {
        name
        for name in names
        if not (Path(folder, name).is_dir() or name.endswith((".py", ".pyi", "py.typed")))
    }


def main() -> None:
    """Write build/typings anew."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    shutil.rmtree(TARGET, ignore_errors=True)
    shutil.copytree(Path(spec.origin).parent, TARGET, ignore=without_types)
    for stub in STUBS.iterdir():
        (TARGET / "fx" / stub.name).with_suffix(".py").unlink()
        shutil.copy(stub, TARGET / "fx")


if __name__ == "__main__":
    main()
