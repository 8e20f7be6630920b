"""The command lines of ``cloud-server``. They do not load torch, so that ``--help`` and error messages are quick."""

from __future__ import annotations

import argparse
import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from shared_hooks.command_line import Parser, add_common
from shared_hooks.errors import SpecError
from shared_hooks.options import add_options, option

# Addresses to listen on: how they are written, and which machines reach them.


# callers are not authenticated by default, so other machines are admitted only on request
DEFAULT_LISTEN = "127.0.0.1:50051"


def with_host(address: str) -> str:
    """``address``, with the loopback host if it is a port alone."""
    return f"127.0.0.1:{address}" if address.isdigit() else address


def check_address(address: str, what: str = "listen") -> None:
    """Raise SpecError unless ``address`` is ``HOST:PORT`` or ``[IPV6]:PORT``."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise SpecError(f'{what}: expected HOST:PORT with a port from 0 to 65535, found "{address}"')


def check_network(listen: str, *, tokens: bool, what: str = "listen") -> None:
    """Raise SpecError for an unencrypted address that other machines can reach."""
    if is_loopback(listen.rpartition(":")[0]):
        return
    also = ", tokens included, which any reader can use" if tokens else ", and use the models"
    raise SpecError(
        f"{what}: {listen} is open to other machines without encryption: any machine on the path can read and change "
        f"what crosses{also}. Give a certificate and a key ([tls], or --cert and --key; `make certs` makes some for "
        "trying), listen on 127.0.0.1 behind a tunnel, or give --insecure if every machine on that network is trusted"
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


TRIALS = ("auto", "always", "never")
"""Which models' cuts are tried before they are served (`processes.trials`)."""


@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """Options about access."""

    identities: Path | None = option(
        None, "FILE", "admit only the identities in it, with their permissions", parse=Path
    )
    insecure: bool = option(False, help="let other machines connect in the clear", key=bool)
    reflection: bool = option(False, help="describe the services to any client (grpcurl)", key=bool)


@dataclass(frozen=True, kw_only=True)
class ServerOptions(AccessOptions):
    """The options of a server, on its command line and, by the same names, in its file; `config.ServerConfig`
    is one.
    """

    listen: str = option(DEFAULT_LISTEN, "HOST:PORT", "port 0 takes a free one", key=str)
    reuse_port: bool = option(False, help="another server may listen there: for rolling updates", key=bool)
    device: str = option("auto", "auto|cpu|KIND[:N][,...]", "KIND: cuda, xpu, mps; of several, each", key=str)
    threads: int | None = option(None, "N", "threads within one operation on the CPU", parse=int, key=int)
    workers: int = option(1, "N", "tails computed at the same time", parse=int, key=int)
    tensor_parallel: int = option(
        1,
        "N",
        "divide each model's weights among N processes, by transformers' tp_plan: for generations; docs/chains.md",
        parse=int,
        key=int,
    )
    worker_processes: bool | None = option(
        None,
        help="each worker is a process of its own, replaced when it ends; default with several workers",
        action="store_true",
        exclusive="where",
        key=bool,
    )
    trials: str = option(
        "auto",
        help="try cuts in a process of its own before they are served; auto: models of your own code",
        choices=TRIALS,
        key=str,
    )
    codecs: tuple[str, ...] = option(
        (),
        "CODEC",
        "decode with it, too: learned:FILE of edge-client learn, a plugin's entry point or MODULE:CLASS; repeatable",
        words=("--codec", "--codec-plugin"),
        action="append",
    )
    metrics: str = option(
        "", "[HOST:]PORT", "Prometheus metrics on this port, of loopback without HOST; default none", parse=with_host
    )
    rest: str = option(
        "",
        "[HOST:]PORT",
        "Open Inference Protocol (KServe v2) by HTTP on this port, of loopback without HOST; default by gRPC alone",
        words=("--rest-port",),
        parse=with_host,
    )
    pages: Path | None = option(
        None,
        "DIR",
        "a folder with a page that asks this server from a browser, shown under /try of --rest-port; default none",
        words=("--try",),
        parse=Path,
    )


def parser() -> Parser:
    """Return the argument parser of ``cloud-server``."""
    made = Parser(
        prog="cloud-server",
        description="Serves the tails of models to edge clients; by default of the shipped model `digits`.",
        epilog="Exit status: 0 drained, 1 failed, 2 wrong command line or file, 3 ended before all was answered, "
        "130 Ctrl-C during start-up. `cloud-server token NAME` makes a token for a client; `cloud-server doctor` "
        "reports what is wrong.",
    )
    made.add_argument("config", nargs="?", type=Path, metavar="CONFIG.toml", help="what to serve, and limits")
    for name, metavar, text in (
        ("--model", "[NAME=]SPEC", "serve a built-in model, a spec file or module:callable; may be repeated"),
        ("--weights", "[NAME=]FILE", "safetensors, .pt or .pth of a --model; NAME is needed if there are several"),
        ("--selection", "[NAME=]FILE", "from edge-client prune: a mask at a cut, or a smaller model, of a --model"),
        (
            "--example",
            "[NAME=]INPUT",
            "the input both sides plan on, if not the spec's: 1,3,224,224[:dtype], a file, module:callable",
        ),
        ("--tails", "[NAME=]CUT,CUT|all", "tails of a --model for heads that are not torch's, each as NAME@CUT"),
        ("--only-middle", "[NAME=]FROM,TO", "of a --model's weights load those between two cuts of a chain alone"),
        ("--only-tail", "[NAME=]CUT", "of a --model's weights load those behind this cut alone"),
        ("--parts", "[NAME=]CUT,...|auto", "a part of a --model on each --device, cut here, in place of a copy"),
    ):
        made.add_argument(name, action="append", default=[], metavar=metavar, help=text)
    text = "hand parts of chains on to this server; NAME and how to reach it by TLS: docs/chains.md; repeatable"
    made.add_argument("--next", action="append", default=[], metavar="[NAME=]HOST:PORT", help=text)
    add_options(made, ServerOptions, but=AccessOptions, unset=True)
    (where,) = made._mutually_exclusive_groups
    text = "workers are threads of this process; default with one"
    where.add_argument("--in-process", action="store_false", default=None, dest="worker_processes", help=text)
    text = "weights in memory, on each device, such as 8GiB; models that are used least give way; default: no bound"
    made.add_argument("--memory-budget", type=_bytes, dest="max_model_bytes", metavar="SIZE", help=text)
    text = "on this machine as one process (default), or scaled out by Ray Serve: docs/ray.md"
    made.add_argument("--on", choices=("machine", "ray"), default="machine", help=text)
    text = "with --on ray: so many of each model, or as many as the work wants; default 1"
    made.add_argument("--replicas", metavar="N|MIN-MAX", help=text)
    _add_access(made)
    text = "time to finish after SIGTERM; default 30"
    made.add_argument("--drain-seconds", type=float, metavar="S", help=text)
    made.add_argument("--hooks", action="store_true", help="list the life cycle's hooks, stage by stage, and exit")
    made.add_argument("--log-format", default="console", choices=("console", "json"), help="default console")
    made.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"), help="default info")
    add_common(made)
    made.basic = "--model --weights --listen --device --threads --workers --cert --key --rest-port --metrics".split()
    return made


def doctor() -> Parser:
    """Return the argument parser of ``cloud-server doctor``, which takes the same arguments."""
    made = parser()
    made.prog = "cloud-server doctor"
    made.description = "Looks at a configuration and this machine as a server would find them, and reports what to fix."
    made.epilog = "Exit status: 0 nothing is wrong, 1 something is, 2 wrong command line."
    made.set_defaults(log_level="error")  # findings are printed by the command itself
    made.add_argument("--json", action="store_true", help="the findings as JSON")
    return made


def token() -> Parser:
    """Return the argument parser of ``cloud-server token``."""
    made = Parser(
        prog="cloud-server token",
        description="Makes a token for an identity. It goes into a file of its own, which only you can read, for the "
        "edge (edge-client --token-file); its entry for the server's file of identities goes to standard output: "
        "cloud-server token edge-1 >> identities.toml",
    )
    made.add_argument("identity", metavar="NAME", help="the identity that it authenticates, such as edge-1")
    made.add_argument(
        "--output", type=Path, metavar="FILE", help="for the token (default: NAME.token); never overwritten"
    )
    made.add_argument("--days", type=float, metavar="N", help="until it expires (default: never)")
    return made


def _add_access(made: argparse.ArgumentParser) -> None:
    access = made.add_argument_group("who may", "docs/access.md; a token: cloud-server token NAME")
    access.add_argument(
        "--cert", type=Path, metavar="FILE", help="the server's certificate, PEM: clients connect by TLS"
    )
    access.add_argument("--key", type=Path, metavar="FILE", help="its private key")
    access.add_argument(
        "--client-ca", type=Path, metavar="FILE", help="admit only clients with a certificate signed by it"
    )
    add_options(access, AccessOptions, unset=True)


_UNITS = {
    "": 1,
    **{f"{sign}B": 1000**power for power, sign in enumerate("kMGT", 1)},
    **{f"{sign}iB": 1024**power for power, sign in enumerate("KMGT", 1)},
}


def _bytes(text: str) -> int:
    """Return the number of bytes in text such as 500MB, 8GiB, or a plain number."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text)
    if found is None or found[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f'expected a size such as 500MB or 8GiB, found "{text}"')
    return int(float(found[1]) * _UNITS[found[2]])
