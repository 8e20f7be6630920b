"""The command line of ``cloud-server``, and what it makes of a configuration."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from cloud_server.access import Tls
from cloud_server.config import DEFAULT_LISTEN, ModelEntry, ServerConfig, read_config, with_host
from cloud_server.limits import Limits
from shared_hooks.config import looks_like_target
from shared_hooks.errors import SpecError
from shared_hooks.lifecycle.log_format import FORMATS
from shared_hooks.models import ModelSpec, Table, load_spec, spec_from_table


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="cloud-server",
        description="Serves the tails of models to edge clients; by default of the shipped model `digits`.",
        epilog="Exit status: 0 drained, 1 failed, 2 wrong command line or file, 3 ended before all was answered, "
        "130 Ctrl-C during start-up. `cloud-server token NAME` makes a token for a client; `cloud-server doctor` says "
        "what is wrong.",
    )
    made.add_argument("config", nargs="?", type=Path, metavar="CONFIG.toml", help="what to serve, and limits")
    for name, metavar, text in (
        ("--model", "[NAME=]SPEC", "serve a built-in model, a spec file or module:callable; may be repeated"),
        ("--weights", "[NAME=]FILE", "safetensors file of a --model; NAME is needed if there are several"),
        ("--selection", "[NAME=]FILE", "from edge-client prune: a mask at a cut, or a smaller model, of a --model"),
        ("--example", "[NAME=]INPUT", "input of a module:callable: 1,3,224,224[:dtype], a .npy file, module:callable"),
    ):
        made.add_argument(name, action="append", default=[], metavar=metavar, help=text)
    made.add_argument("--depth", type=int, metavar="N", help="how many levels of modules to descend in each --model")
    made.add_argument("--listen", metavar="HOST:PORT", help=f"default {DEFAULT_LISTEN}; port 0 takes a free one")
    made.add_argument("--reuse-port", action="store_true", help="another server may listen there: for rolling updates")
    made.add_argument("--device", metavar="auto|cpu|cuda[:N]", help="default auto")
    made.add_argument("--threads", type=int, metavar="N", help="threads within one operation on the CPU")
    made.add_argument("--workers", type=int, metavar="N", help="tails computed at the same time; default 1")
    where = made.add_mutually_exclusive_group()
    text = "each worker is a process of its own, replaced when it ends; default with several workers"
    where.add_argument("--worker-processes", action="store_true", default=None, dest="worker_processes", help=text)
    text = "workers are threads of this process; default with one"
    where.add_argument("--in-process", action="store_false", default=None, dest="worker_processes", help=text)
    text = "on this machine as one process (default), or scaled out by Ray Serve: docs/ray.md"
    made.add_argument("--on", choices=("machine", "ray"), default="machine", help=text)
    text = "with --on ray: so many of each model, or as many as the work wants; default 1"
    made.add_argument("--replicas", metavar="N|MIN-MAX", help=text)
    _add_access(made)
    default = f"time to finish after SIGTERM; default {Limits.drain_seconds:g}"
    made.add_argument("--drain-seconds", type=float, metavar="S", help=default)
    text = "Prometheus metrics on this port, of loopback without HOST; default none"
    made.add_argument("--metrics", type=with_host, metavar="[HOST:]PORT", help=text)
    text = "Open Inference Protocol (KServe v2) by HTTP on this port, of loopback without HOST; default by gRPC alone"
    made.add_argument("--rest-port", type=with_host, dest="rest", metavar="[HOST:]PORT", help=text)
    made.add_argument("--hooks", action="store_true", help="list the life cycle's hooks, stage by stage, and exit")
    made.add_argument("--log-format", default="console", choices=FORMATS, help="default console")
    made.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"), help="default info")
    return made


def _add_access(made: argparse.ArgumentParser) -> None:
    access = made.add_argument_group("who may", "docs/access.md; a token: cloud-server token NAME")
    access.add_argument(
        "--cert", type=Path, metavar="FILE", help="the server's certificate, PEM: clients connect by TLS"
    )
    access.add_argument("--key", type=Path, metavar="FILE", help="its private key")
    access.add_argument("--client-ca", type=Path, metavar="FILE", help="let in only who has a certificate signed by it")
    access.add_argument("--identities", type=Path, metavar="FILE", help="let in only who is in it, and as it says")
    access.add_argument("--insecure", action="store_true", help="let other machines connect in the clear")
    access.add_argument("--reflection", action="store_true", help="describe the services to who asks (grpcurl)")


def configure(options: argparse.Namespace) -> ServerConfig:
    """The configuration file, if any, with the command line on top of it. Raises SpecError or UnknownModel."""
    config = composed(options)
    config.check_access()
    return config


def composed(options: argparse.Namespace) -> ServerConfig:
    """As `configure`, and nobody has looked at certificates and identities yet."""
    config = read_config(options.config) if options.config else ServerConfig()
    names = ("listen", "device", "threads", "workers", "worker_processes", "metrics", "rest", "identities")
    given = {name: getattr(options, name) for name in names}
    given |= {name: True for name in ("insecure", "reflection", "reuse_port") if getattr(options, name)}
    given["tls"] = _tls(options)
    config = dataclasses.replace(config, **{name: value for name, value in given.items() if value is not None})
    if options.drain_seconds is not None:
        limits = dataclasses.replace(config.limits, drain_seconds=options.drain_seconds)
        config = dataclasses.replace(config, limits=limits)
    if options.replicas is not None:
        if options.on != "ray":
            raise SpecError("--replicas: only with --on ray; on one machine there are --workers")
        config = dataclasses.replace(config, scale=config.scale.with_replicas(options.replicas))
    references = options.model or ([] if config.models else ["digits"])
    ids = [load_spec(reference).model_id for reference in references]
    weights, examples = _by_model("--weights", options.weights, ids), _by_model("--example", options.example, ids)
    selections = _by_model("--selection", options.selection, ids)
    models = [
        ModelEntry(_selected(_spec(id, reference, weights, examples), selections.get(id)), options.depth)
        for id, reference in zip(ids, references, strict=True)
    ]
    return dataclasses.replace(config, models=(*config.models, *models))


def _tls(options: argparse.Namespace) -> Tls | None:
    """What the command line says instead of the file's [tls]; None where it says nothing."""
    if options.cert is None and options.key is None and options.client_ca is None:
        return None
    if options.cert is None or options.key is None:
        raise SpecError("--cert, --key: the one needs the other (and --client-ca both)")
    return Tls(options.cert, options.key, options.client_ca)


def _by_model(option: str, texts: Sequence[str], ids: Sequence[str]) -> Mapping[str, str]:
    """What an option says for each model; without ``NAME=`` it is for the only one."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            if len(ids) != 1:
                raise SpecError(f"{option} {text}: {len(ids)} models are given by --model; say NAME={text}")
            name, value = ids[0], text
        if name not in ids:
            known = ", ".join(ids) or "none"
            raise SpecError(f'{option} {text}: no model "{name}" is given by --model; there is: {known}')
        found[name] = value
    return found


def _selected(spec: ModelSpec, selection: str | None) -> ModelSpec:
    return spec if selection is None else dataclasses.replace(spec, selection=Path(selection))


def _spec(id: str, reference: str, weights: Mapping[str, str], examples: Mapping[str, str]) -> ModelSpec:
    if id not in examples:
        return load_spec(reference, weights=weights.get(id))
    target = reference.removeprefix(f"{id}=")
    if not looks_like_target(target):
        raise SpecError(f"--example {id}={examples[id]}: a spec file has its own example; this is for module:callable")
    table = Table({"id": id, "factory": target, "example": _example(examples[id])}, f"--model {reference} --example")
    return spec_from_table(table, Path.cwd(), weights=weights.get(id))


def _example(text: str) -> object:
    """A spec's ``example`` entry: a table for ``1,3,224,224[:dtype]``, else the text itself."""
    sizes, _, dtype = text.partition(":")
    parts = sizes.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        return text
    tensor = {"shape": [int(part) for part in parts], "dtype": dtype or "float32", "low": 0, "high": 2}
    return {"args": [tensor]}
