"""Hooks of mkdocs: pages beside those of docs/, and the sections of docs/pages.md as navigation.

README.md, CONTRIBUTING.md, CHANGELOG.md and SECURITY.md become pages, each module of public names a
page of its docstrings. A source file that a page links is copied to the site. A link to a folder
becomes plain text: a site has no listing of folders.
"""

from __future__ import annotations

import importlib
import inspect
import posixpath
import re
import runpy
import types
from collections.abc import Iterator
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import torchgspmd as gspmd
from torchgspmd.compiler.options import Option, rows_for

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {"README.md": "index.md"}  # pages of the root whose name on the site differs
OUTSIDE |= {name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")}
MAIN = "reference/torchgspmd.md"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"(^```.*?^```)", re.M | re.S)


def _target(path: str, page: str) -> str | None:
    """Return the place on the site of a file of the repository, or None for a folder."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return None
    if not (ROOT / path).is_file():
        raise FileNotFoundError(f"{page} links {path}")
    return f"source/{path}.txt" if path.endswith((".py", ".md")) else f"source/{path}"


def _moved(text: str, page: str, found: dict[str, str]) -> str:
    """Return a page with links of the site; add linked source files to `found`."""
    folder = posixpath.dirname(page)

    def replace(match: re.Match[str]) -> str:
        image, label, link, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(folder, link))
        target = _target(path, page)
        if target is None:
            return label
        if target.startswith("source/"):
            found[target] = path
        return f"{image}[{label}]({target}{anchor or ''})"

    parts = FENCE.split(text)
    return "".join(p if p.startswith("```") else LINK.sub(replace, p) for p in parts)


def _identifier(value: object) -> str:
    if isinstance(value, types.ModuleType):
        return value.__name__
    return f"{value.__module__}.{value.__qualname__}"  # pyright: ignore[reportAttributeAccessIssue]


def _reference() -> Iterator[tuple[str, str]]:
    """Yield (page, text) of the reference: a page of names, and one for each public module."""
    lines = ["# gspmd", "", "Import it as `import torchgspmd as gspmd`.", ""]
    for name in sorted(gspmd.NAMES, key=str.lower):
        value = getattr(gspmd, name)
        if isinstance(value, types.ModuleType):
            yield f"reference/{name}.md", _module_page(name, value)
        elif inspect.isclass(value) or inspect.isfunction(value):
            lines += _entry(f"gspmd.{name}", value)
    yield (
        "reference/every_error.md",
        runpy.run_path(str(ROOT / "tools" / "error_list.py"))["page"](),
    )
    yield MAIN, "\n".join(lines)


def _module_page(name: str, module: types.ModuleType) -> str:
    lines = [f"# gspmd.{name}", "", inspect.getdoc(module) or "", ""]
    for value in module.PUBLIC:
        lines += _entry(f"gspmd.{name}.{value.__name__}", value)
    return "\n".join(lines)


def _entry(heading: str, value: object) -> list[str]:
    return [f"::: {_identifier(value)}", "    options:", f"      heading: {heading}", ""]


def _navigation(pages: list[str]) -> list[dict[str, list[str]]]:
    """Return the sections of docs/pages.md, then the reference."""
    text, sections = (ROOT / "docs" / "pages.md").read_text(), []
    for section, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.M | re.S):
        rows = re.findall(r"^\| .*", body, re.M)
        links = [
            _target(posixpath.normpath(f"docs/{m[3]}"), "") for m in map(LINK.search, rows) if m
        ]
        sections.append({section: [link for link in links if link and link.endswith(".md")]})
    reference = sorted(page for page in pages if page.startswith("reference/"))
    reference.sort(key=lambda page: page != MAIN)
    home = {"Home": ["index.md", "pages.md"]}
    return [home, *sections, {"Reference": reference}]


def _parameter(row: Option) -> griffe.Parameter:
    named = griffe.ParameterKind("keyword-only")
    return griffe.Parameter(row.name, annotation=row.type, kind=named, default=repr(row.default))


class Docstrings(griffe.Extension):
    """Adapts docstrings: options that run time adds, and sections that griffe calls Examples."""

    def on_object(self, *, obj: griffe.Object, **rest: object) -> None:
        if (docstring := obj.docstring) is None:
            return
        if "{options}" in docstring.value and isinstance(obj, griffe.Function):
            function = getattr(importlib.import_module(obj.module.path), obj.name)
            docstring.value = inspect.getdoc(function) or ""
            obj.parameters = griffe.Parameters(
                *(p for p in obj.parameters if p.name != "options"),
                *(_parameter(row) for row in rows_for(obj.name)),  # pyright: ignore
            )
        docstring.value = re.sub(r"^Example:$", "Examples:", docstring.value, flags=re.M)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    found: dict[str, str] = {}
    pages = {target: (ROOT / path).read_text() for path, target in OUTSIDE.items()}
    sources = {target: path for path, target in OUTSIDE.items()}
    for file in list(files.documentation_pages()):
        pages[file.src_uri] = file.content_string
        sources[file.src_uri] = f"docs/{file.src_uri}"
        files.remove(file)
    for target, text in pages.items():
        moved = _moved(text, sources[target], found)
        files.append(File.generated(config, target, content=moved))
    for target, text in _reference():
        files.append(File.generated(config, target, content=text))
    for target, path in found.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / path)))
    config.nav = _navigation([file.src_uri for file in files.documentation_pages()])
    return files
