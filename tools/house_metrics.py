"""Print how the package measures against docs/design.md: vague names, sizes of files and folders.

python tools/house_metrics.py torchgspmd [ANOTHER_TREE ...]
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from pathlib import Path

VAGUE = frozenset("made found given kept held wanted settled known parts".split())


def vague_names(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, name) of every variable that is assigned, and every argument, with a vague name."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
            names.append((node.lineno, node.id))
        elif isinstance(node, ast.arg) and node.arg in VAGUE:
            names.append((node.lineno, node.arg))
    return names


def functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def is_annotated(function: ast.FunctionDef) -> bool:
    """Whether the result and every argument but self and cls have a type."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    typed = [a.annotation is not None for a in arguments if a.arg not in ("self", "cls")]
    return function.returns is not None and all(typed)


def report(root: Path, show: bool) -> None:
    files = sorted(root.rglob("*.py"))
    trees = {path: ast.parse(path.read_text()) for path in files}
    lines = {path: len(path.read_text().splitlines()) for path in files}
    vague = {path: vague_names(tree) for path, tree in trees.items()}
    defined = [function for tree in trees.values() for function in functions(tree)]
    folders = Counter(path.parent for path in files)
    print(
        f"{root}: {len(files)} files, {sum(lines.values()):,} lines, "
        f"{sum(path.stat().st_size for path in files):,} bytes"
    )
    print(f"  vague names assigned or taken as arguments: {sum(map(len, vague.values()))}")
    print(f"  functions with types: {sum(map(is_annotated, defined)) / len(defined):.1%}")
    print(
        f"  largest folder: {max(folders.values())} files; files over 400 lines: "
        f"{[f'{path.relative_to(root)} ({n})' for path, n in lines.items() if n > 400]}"
    )
    for folder in sorted(folders):
        count = sum(len(vague[path]) for path in files if path.parent == folder)
        print(f"    {str(folder.relative_to(root)):24} {folders[folder]:3} files {count:4} vague")
    for path in files if show else ():
        for line, name in vague[path]:
            print(f"{path}:{line}: {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("roots", nargs="+", type=Path)
    parser.add_argument("--show", action="store_true", help="list every vague name")
    options = parser.parse_args()
    for root in options.roots:
        report(root, options.show)


if __name__ == "__main__":
    main()
