"""Define options that several commands share."""

from __future__ import annotations

import argparse
import inspect
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeAlias

from edge_client.screen import finite, one_line
from edge_client.settings import FILE_NAME, NONE, OWN, VARIABLE, how_named, server_of
from shared_hooks.command_line import Parser
from shared_hooks.errors import SpecError
from shared_hooks.files import write_text

if TYPE_CHECKING:
    from edge_client.adaptive import AutoClient
    from edge_client.benching.run import Benched
    from edge_client.client import EdgeClient
    from edge_client.credentials import Credentials
    from edge_client.live import Dashboard, ToSinks
    from edge_client.model_choice import ModelChoice
    from shared_hooks.sinks import Sink


def pixels(text: str) -> tuple[int, int]:
    """Parse WIDTHxHEIGHT."""
    width, cross, height = text.lower().partition("x")
    if not (cross and width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f'expected WIDTHxHEIGHT in pixels, such as 640x480, found "{text}"')
    return int(width), int(height)


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


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


log_format = "console"
"""--log-format of this process: the format of `say`."""


def say(text: str, level: str = "info") -> None:
    """Print one line to standard error; with --log-format json as an object, like logged lines."""
    line = one_line(text)
    if log_format == "json":
        at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = json.dumps({"time": at, "level": level, "logger": "edge_client", "message": line})
    else:
        line = f"edge-client: error: {line}" if level == "error" else f"edge-client: {line}"
    print(line, file=sys.stderr, flush=True)


# Exit statuses of ``edge-client``.


OK: Final = 0
SOME_FAILED: Final = 1  # an input failed, or a cut is not exact
USAGE: Final = 2  # the command line, a file it names, the model spec, the cut
CONNECTION: Final = 3  # no server, or a mismatch with it
INTERRUPTED: Final = 130  # Ctrl-C


# The options by which a command authenticates itself and its server; they import nothing heavy.


def add_credentials(command: argparse.ArgumentParser) -> None:
    """Add the options, in a group of their own."""
    group = command.add_argument_group("who may", "for a server that asks (docs/access.md); files are PEM")
    group.add_argument("--tls", action="store_true", help="connect by TLS, trusting the authorities that gRPC brings")
    group.add_argument("--ca", metavar="FILE", help="connect by TLS, trusting the authorities in FILE instead")
    group.add_argument("--cert", metavar="FILE", help="this side's certificate, for a server that wants one")
    group.add_argument("--key", metavar="FILE", help="its private key")
    group.add_argument("--server-name", metavar="NAME", help="in the server's certificate (default: --server's host)")
    group.add_argument("--token-file", metavar="FILE", help="holds the token (default: the variable ISTHMUS_TOKEN)")
    group.add_argument("--insecure", action="store_true", help="let the token travel to other machines in the clear")


def credentials_of(options: argparse.Namespace) -> Credentials:
    """Return the options' credentials. Raises SpecError for contradictory ones."""
    from edge_client.credentials import Credentials  # not needed for --help

    return Credentials(
        tls=options.tls,
        ca=options.ca,
        certificate=options.cert,
        key=options.key,
        server_name=options.server_name,
        token_file=options.token_file,
        insecure=options.insecure,
    )


def power_of(options: argparse.Namespace) -> tuple[float, float] | None:
    """Return watts of this machine, active and idle, from --power-active and --power-idle. Raises SpecError for only
    one.
    """
    if options.power_active is None and options.power_idle is None:
        return None
    if options.power_active is None or options.power_idle is None:
        raise SpecError("--power-active and --power-idle go together")
    return options.power_active, options.power_idle


ONLY_FOR_AUTO = (
    *("--objective", "--max-edge-memory", "--max-bytes-per-second", "--rate", "--min-accuracy", "--power-active"),
    *("--power-idle", "--edge-profile", "--cloud-profile", "--profile-seconds", "--partitioner"),
    *("--partitioner-option", "--log-decisions"),
)
NOT_FOR_EDGE_ONLY = ("--codec", "--calibration", "--max-loss", "--exact", "--no-exact", "--fallback")


def check_provider(options: argparse.Namespace) -> None:
    """Raise SpecError for --provider if PyTorch runs heads."""
    if "--provider" in getattr(options, "given", ()):
        raise SpecError("--provider has an effect with --heads only: PyTorch runs the model itself")


def check_effects(options: argparse.Namespace) -> None:
    """Raise SpecError for an option that has no effect with this ``--split``."""
    given = getattr(options, "given", ())
    check_provider(options)
    if options.split != "auto" and (wrong := [one for one in ONLY_FOR_AUTO if one in given]):
        what = f"a cut that is given ({options.split}) is not chosen"
        raise SpecError(f"{wrong[0]} has an effect with --split auto only: {what}")
    if options.split == "edge-only" and (wrong := [one for one in NOT_FOR_EDGE_ONLY if one in given]):
        raise SpecError(f"{wrong[0]} has no effect with --split edge-only: nothing is sent")


# ``--server`` of every command: the given address, or the default (`edge_client.settings`), which is shown.


OPTION = "--server"


def add_server(command: argparse.ArgumentParser, what: str = "") -> None:
    """Add the option. ``what``: what the command does with a server, or without one."""
    default = f"(default: {VARIABLE}, then [client] server of {FILE_NAME})"
    command.add_argument(
        OPTION,
        metavar=f"HOST:PORT|{OWN}|{NONE}",
        help=f'{what + "; " if what else ""}"{OWN}" starts one on this machine {default}',
    )


def chosen(options: argparse.Namespace, *, chain: bool = False) -> str | None:
    """Return ``HOST:PORT``, `OWN`, or None without a server; a default is shown on standard error. ``chain``: see
    `server_of`.
    """
    found = server_of(options.server, getattr(options, "config", None), chain=chain)
    if found.address is not None and found.origin != OPTION:
        say(f"{found}")
    return found.address


def needed(options: argparse.Namespace, *, chain: bool = False) -> str:
    """Return the server, which is required. Raises SpecError without one."""
    server = chosen(options, chain=chain)
    if server is None:
        raise SpecError(f"no server: {how_named()}; --server {OWN} starts one on this machine for as long as this runs")
    return server


@contextmanager
def running(server: str | None, choice: ModelChoice, observers: Sequence[str] = ()) -> Iterator[str | None]:
    """Return ``server``; for `OWN` start one, and return its address while in the context."""
    if server != OWN:
        yield server
        return
    from edge_client.process import local_server

    say("starting a server on this machine")
    with local_server(choice, observers=observers) as address:
        yield address


def keywords(options: argparse.Namespace, task: Callable[..., Any], *but: str) -> dict[str, Any]:
    """Return the keyword arguments that a command passes to its task: options of the same name. ``but``:
    except these.
    """
    found: dict[str, Any] = {}
    for name, keyword in inspect.signature(task).parameters.items():
        if keyword.kind is not keyword.KEYWORD_ONLY or name in but:
            continue
        if name == "progress" and hasattr(options, "no_progress"):
            found[name] = not options.no_progress
        elif name == "credentials" and hasattr(options, "token_file"):
            found[name] = credentials_of(options)
        elif name == "failures":
            found[name] = "raise" if options.debug else "return"
        elif hasattr(options, name):
            found[name] = getattr(options, name)
    return found


# What commands print. With --json, standard output holds only the JSON.


def screen_width() -> int | None:
    """Return the width of the terminal; None if standard output is none, as a file's lines may have any width."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def write_json(value: Any, target: str, stdout: TextIO) -> None:
    """Write ``value`` as JSON to a file, or to ``stdout`` for "-". NaN and infinities become null."""
    text = json.dumps(finite(value), indent=2, allow_nan=False) + "\n"
    if target == "-":
        stdout.write(text)
        stdout.flush()
        return
    write_text(target, text, "--json")


def check_json_target(target: str | None) -> None:
    """Raise SpecError before long work for a file that cannot be written."""
    if target is None or target == "-":
        return
    path = Path(target)
    known = path.exists()
    if known and not path.is_file() and not path.is_dir():
        return  # a reader of the pipe would take it for the end
    try:
        path.open("ab").close()
        if not known:
            path.unlink()
    except OSError as error:
        raise SpecError(f"--json: {target} cannot be written: {error.strerror}") from error


def show(options: argparse.Namespace, found: Any, text: str) -> None:
    """Show a task's result: as JSON if requested, and as text unless standard output has the JSON."""
    if options.json:
        write_json(found, options.json, options.stdout)
    if options.json != "-":
        print(text, file=options.stdout, flush=True)


def show_bench(options: argparse.Namespace, measure: Callable[[], Benched]) -> int:
    """Run a bench and show its result, as a page, too; return the exit status. Results before Ctrl-C, or before the
    server was lost, are written.
    """
    check_json_target(options.json)
    if options.html:
        if find_spec("jinja2") is None:
            raise SpecError('jinja2 missing: pip install "isthmus[sweep]"')
        write_text(options.html, "", "--html")
    found = measure()
    if options.html:
        write_text(options.html, found.page(), "--html")
    show(options, found.as_dict(), found.text(screen_width()))
    if isinstance(found.failure, KeyboardInterrupt):
        return INTERRUPTED
    return OK if found.failure is None else CONNECTION


# ``--dashboard`` and ``--sink`` of a run: live observers. Imports page and sinks only when requested.


class Looking:
    """The observers of one command; `close` it after the client. Raises SpecError for a sink that cannot be opened."""

    def __init__(self, sinks: Sequence[str], listen: str | None) -> None:
        """``listen``: of the page, [HOST:]PORT; None: no page."""
        self._listen = listen
        self._page: Dashboard | None = None
        self._to_sinks: ToSinks | None = None
        self._opened: list[Sink] = []
        if sinks:
            from shared_hooks.sinks import open_sink

            try:
                for text in sinks:
                    self._opened.append(open_sink(text))
            except BaseException:
                self.close()
                raise

    @property
    def wanted(self) -> bool:
        """Whether there is any observer; then layers are measured."""
        return self._listen is not None or bool(self._opened)

    def begin(self, client: EdgeClient) -> None:
        """Start the page."""
        if self._listen is not None:
            from edge_client.live import Dashboard

            self._page = Dashboard(client, self._listen)
            say(f"dashboard at {self._page.url}")

    def count(self, client: EdgeClient) -> None:
        """Start the sinks; requests before are warm-up."""
        if self._opened:
            from edge_client.live import ToSinks

            self._to_sinks = ToSinks(*self._opened)
            client.lifecycle.register(self._to_sinks)

    def follow(self, chooser: AutoClient) -> None:
        """Show the decisions of ``chooser``."""
        if self._page is not None:
            self._page.follow(chooser)

    def close(self) -> None:
        """Close the page and flush the sinks."""
        if self._page is not None:
            self._page.close()
        if self._to_sinks is None:
            for sink in self._opened:
                sink.close()
            return
        self._to_sinks.close()
        if number := self._to_sinks.left_out:
            say(f"--sink: {number} answers were left out, for a sink was too slow")
        if number := self._to_sinks.failures:
            say(f"--sink: {number} answers could not be written")
