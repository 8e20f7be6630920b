"""`docs/options.md`: every option that is declared once, as tables.

python -m studies.options > docs/options.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import MISSING, fields

from cloud_server.arguments import ServerOptions
from edge_client import options as declared
from shared_hooks.options import add_options, option_of

TASKS = {
    "plan": declared.PlanOptions,
    "plan_generation": declared.PlanGenerationOptions,
    "plan_chain": declared.PlanChainOptions,
    "profile": declared.ProfilingOptions,
    "sweep": declared.SweepOptions,
    "bench": declared.BenchOptions,
    "verify": declared.VerifyOptions,
    "calibrate": declared.CalibrateOptions,
    "learn": declared.LearnOptions,
    "leakage": declared.LeakageOptions,
    "prune": declared.PruneOptions,
    "export": declared.ExportOptions,
    "hierarchy": declared.HierarchyOptions,
}
"""Function of `edge_client` -> what it takes."""
INTRODUCTION = """# Options

Written by `python -m studies.options` from `edge_client/options.py` and `cloud_server/arguments.py`, where each option
is declared once: a field of a dataclass is a keyword argument in Python, an option of the command, and for the server a
key of its file. What each does in full stands in the docstring, `help(edge_client.plan)`; what commands take beside
these, in `edge-client COMMAND --help all`.
"""


def page() -> str:
    """The page as Markdown."""
    return "\n".join([INTRODUCTION, *_tasks(), *_server()]) + "\n"


def _tasks() -> Iterator[str]:
    for task, options in TASKS.items():
        command = "plan --generate" if task == "plan_generation" else "plan" if task == "plan_chain" else task
        yield f"## {task}\n\n`edge_client.{task}(...)`, `edge-client {command}`.\n"
        yield "| keyword | option | default | |\n|---|---|---|---|"
        yield from _rows(options)
        yield ""


def _server() -> Iterator[str]:
    yield "## cloud-server\n\nThe first column: a key at the top of its file ([operations.md](operations.md)).\n"
    yield "| key | option | default | |\n|---|---|---|---|"
    yield from _rows(ServerOptions)


def _rows(options: type) -> Iterator[str]:
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser, options)
    by_name = {action.dest: action for action in parser._actions}
    for each in fields(options):
        own = option_of(each)
        if own is None:
            continue
        action = by_name[each.name]
        value = "" if action.nargs == 0 else action.metavar or "|".join(map(str, action.choices or ()))
        words = ", ".join(f"`{word} {value}`" if value else f"`{word}`" for word in action.option_strings)
        default = "required" if each.default is MISSING else "" if each.default is None else f"`{each.default!r}`"
        key = f"`{each.name}`" if options is not ServerOptions or own.key is not None else ""
        yield f"| {key} | {_cell(words)} | {_cell(default)} | {_cell(own.help.replace('%%', '%'))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
