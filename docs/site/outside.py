"""A hook of mkdocs: what lies outside docs/ and belongs on the site, at the place that links in the repository say.

README.md becomes the first page; SECURITY.md, CHANGELOG.md and deploy/README.md are pages, too. A file that some page
links to (an example, a configuration) lies on the site as it is. The reference is made of docstrings and parsers.
"""

from __future__ import annotations

import argparse
import posixpath
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "SECURITY.md", "CHANGELOG.md", "deploy/README.md", "examples/README.md")
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
COMMANDS = "reference/commands.md"
REFERENCE = {
    "edge_client": "The client's side.",
    "edge_client.aio": "The client for asyncio.",
    "edge_client.sources": "Where inputs come from.",
    "edge_client.live": "A page and sinks, while requests run.",
    "shared_hooks": "The engine, without any network.",
    "shared_hooks.models": "Specs, weights, inputs.",
    "shared_hooks.observers": "Looks inside a model.",
    "shared_hooks.sinks": "Where numbers go.",
    "shared_hooks.lifecycle": "Hooks of your own at each stage.",
    "shared_hooks.errors": "Every error that is raised on purpose.",
}
"""Packages whose public names (``__all__``) have a page, made of the docstrings."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds pages and files from outside."""
    for name in PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    generated = {COMMANDS: "\n".join(_command_lines())}
    generated |= {f"reference/{name}.md": "\n".join(_reference(name, about)) for name, about in REFERENCE.items()}
    for name, content in generated.items():
        files.append(File.generated(config, name, content=content))
    linked = {place for file in files.documentation_pages() for place in _linked(file)}
    for place in sorted(linked):
        if not place.startswith("docs/") and place not in PAGES and (ROOT / place).is_file():
            files.append(File.generated(config, place, content=(ROOT / place).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the repository has them, turned to where things are on the site."""
    folder = posixpath.dirname(page.file.src_uri)

    def moved(found: re.Match[str]) -> str:
        target = _on_site(_in_repository(page.file, found[2]))
        return f"{found[1]}{posixpath.relpath(target, folder or '.')}{found[3]}"

    return LINK.sub(moved, markdown)


def _linked(file: File) -> Iterator[str]:
    for found in LINK.finditer(file.content_string):
        yield _in_repository(file, found[2])


def _in_repository(file: File, target: str) -> str:
    """The path in the repository that a page's link means."""
    place = file.src_uri if file.generated_by else f"docs/{file.src_uri}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), target))


def _on_site(place: str) -> str:
    return place.removeprefix("docs/")


def _reference(package: str, about: str) -> Iterator[str]:
    """All public names of a package."""
    yield f"# {package}\n\n{about}"
    names = getattr(import_module(package), "__all__", None)
    if names is None:
        yield f"\n::: {package}\n    options: {{show_root_heading: false, members_order: source}}"
    else:
        have_pages = {"__version__", *(name.rpartition(".")[2] for name in REFERENCE)}
        yield from (_entry(package, name) for name in names if name not in have_pages)


def _entry(package: str, name: str) -> str:
    """With what it inherits from a class of ours that has no entry itself."""
    thing = getattr(import_module(package), name)
    bases = [base for base in getattr(thing, "__mro__", ())[1:] if base.__module__.startswith(package)]
    inherits = str(any(not hasattr(import_module(package), base.__name__) for base in bases)).lower()
    return f"\n::: {package}.{name}\n    options: {{inherited_members: {inherits}}}"


def _command_lines() -> Iterator[str]:
    """``--help`` of every command."""
    from cloud_server.arguments import parser as server_parser
    from edge_client.commands.arguments import make_parser

    yield "# Command lines\n\nWhat `--help` says."
    parser = make_parser()
    (commands,) = (action for action in parser._actions if action.dest == "command")
    named = commands.choices or {}
    everything: list[argparse.ArgumentParser] = [server_parser(), parser, *named.values()]  # type: ignore[union-attr]
    for one in everything:
        yield f"\n## {one.prog}\n\n```text\n{one.format_help().rstrip()}\n```"
