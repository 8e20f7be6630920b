"""Options that several commands have."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TypeAlias

from edge_client.commands.kinds import names as _names
from shared_hooks.command_line import Parser

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
LOSSLESS = ("raw", "lz4", "zstd", "shuffle-lz4", "shuffle-zstd", "sparse")
LOSSY = ("bf16", "fp16", "int8", "int6", "int5", "int4", "int3", "int2", "int1", "basis", "frames")
CODECS = (*LOSSLESS, *LOSSY)
"""As `shared_hooks.codecs` has them, which loads torch."""
CHOOSES = "chooses by speed, size and link"
"""What --codec auto does, where requests are sent."""


def add_codec(command: argparse.ArgumentParser, *, auto: str = "") -> None:
    """``auto``: what the word does, where it may stand."""
    chosen = f"; auto {auto}" if auto else ""
    command.add_argument(
        "--codec",
        choices=(*CODECS, "auto") if auto else CODECS,
        metavar="CODEC",
        default="raw",
        help=f"for the frontier: without loss {', '.join(LOSSLESS)}; with a loss {', '.join(LOSSY)}{chosen} "
        "(default: raw)",
    )


def add_losses(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--calibration", metavar="FILE", help="of edge-client calibrate, for --codec auto, basis, frames"
    )
    command.add_argument(
        "--max-loss", metavar="SHARE", help="that --codec auto may lose, such as 0.5%% (default: nothing)"
    )


def add_observe(
    command: argparse.ArgumentParser, *, default: Sequence[str] = (), text: str = "observe both sides"
) -> None:
    command.add_argument(
        "--observe",
        dest="observers",
        type=_names,
        default=list(default),
        metavar="NAME,NAME",
        help=f'{text}: "activation" for statistics, "debug" for NaN and Inf, and such; another word lists them; the '
        f"server must allow them (default: {','.join(default) or 'none'})",
    )


def add_sink(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--sink",
        dest="sinks",
        action="append",
        default=[],
        metavar="KIND:WHERE",
        help="write times, metrics and what observers see to tensorboard:DIR, wandb:PROJECT (offline), or "
        "MODULE:NAME[:TEXT] of your own; may be repeated",
    )


def add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config", metavar="FILE.toml", help="this side's [lifecycle], hooks of your own, and [tracing]"
    )
    command.add_argument("--log-level", choices=("debug", "info", "warning"), help="log connections, moves, errors")
    command.add_argument("--log-format", choices=("console", "json"), default="console", help="of these lines")
