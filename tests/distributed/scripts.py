"""The examples on the processes of tests/distributed, as torchrun would start them."""

import sys
from pathlib import Path
from unittest.mock import patch

from ranks import distributed, load


def run_script(script: Path, arguments: list[str]):
    """Run the main function of a script, whose folder has the modules that it imports."""
    before = dict(sys.modules)
    path = [str(script.parent), *sys.path]
    with patch.object(sys, "argv", [str(script), *arguments]), patch.object(sys, "path", path):
        try:
            load(str(script), "train").main()
        finally:  # another example has other modules of these names
            for name, module in list(sys.modules.items()):
                file = getattr(module, "__file__", None) or ""
                if name not in before and file.startswith(str(script.parents[1])):
                    del sys.modules[name]


@distributed()
def run_main(mesh, script: Path, arguments: list[str]):
    """Run it on the ranks of a mesh."""
    run_script(script, arguments)
