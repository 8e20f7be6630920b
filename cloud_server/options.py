"""What the command line of ``cloud-server`` makes of a configuration."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence

from cloud_server.access import Tls
from cloud_server.arguments import parser as parser
from cloud_server.config import ModelEntry, NextServer, ServerConfig, read_config
from shared_hooks.codecs import register
from shared_hooks.errors import SpecError
from shared_hooks.models import load_spec


def configure(options: argparse.Namespace) -> ServerConfig:
    """The configuration file, if any, with the command line on top of it. Raises SpecError or UnknownModel."""
    config = composed(options)
    config.check_access()
    return config


def composed(options: argparse.Namespace) -> ServerConfig:
    """As `configure`, and nobody has looked at certificates and identities yet."""
    config = read_config(options.config) if options.config else ServerConfig()
    names = (
        "listen device threads workers worker_processes tensor_parallel metrics rest pages identities trials".split()
    )
    given = {name: getattr(options, name) for name in names}
    given |= {name: True for name in ("insecure", "reflection", "reuse_port") if getattr(options, name)}
    given["tls"] = _tls(options)
    given["next"] = (*config.next, *map(_next, options.next))
    given["codecs"] = (*config.codecs, *(register(one) for one in options.codec))
    config = dataclasses.replace(config, **{name: value for name, value in given.items() if value is not None})
    bounds = {name: getattr(options, name) for name in ("drain_seconds", "max_model_bytes")}
    bounds = {name: value for name, value in bounds.items() if value is not None}
    config = dataclasses.replace(config, limits=dataclasses.replace(config.limits, **bounds))
    if options.replicas is not None:
        if options.on != "ray":
            raise SpecError("--replicas: only with --on ray; on one machine there are --workers")
        config = dataclasses.replace(config, scale=config.scale.with_replicas(options.replicas))
    references = options.model or ([] if config.models else ["digits"])
    ids = [load_spec(reference).model_id for reference in references]
    weights, examples = _by_model("--weights", options.weights, ids), _by_model("--example", options.example, ids)
    selections = _by_model("--selection", options.selection, ids)
    tails, only = _by_model("--tails", options.tails, ids), _only(options, ids)
    parts = _by_model("--parts", options.parts, ids)
    models = []
    for id, reference in zip(ids, references, strict=True):
        of = {"weights": weights.get(id), "selection": selections.get(id), "example": examples.get(id)}
        cuts = tuple(one.strip() for one in tails[id].split(",")) if id in tails else ()
        between = tuple(one.strip() for one in parts[id].split(",")) if id in parts else ()
        models.append(ModelEntry(load_spec(reference, **of), tails=cuts, only=only.get(id, ()), parts=between))
    return dataclasses.replace(config, models=(*config.models, *models))


def _only(options: argparse.Namespace, ids: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """The part whose weights are loaded, of each model that has one. Raises SpecError."""
    found: dict[str, tuple[str, ...]] = {}
    for option, given, count in (("--only-middle", options.only_middle, 2), ("--only-tail", options.only_tail, 1)):
        for id, text in _by_model(option, given, ids).items():
            cuts = tuple(one.strip() for one in text.split(","))
            if len(cuts) != count or not all(cuts):
                expected = "the cuts where a part begins and ends" if count == 2 else "the cut where the tail begins"
                raise SpecError(f"{option} {text}: expected {expected}")
            if id in found:
                raise SpecError(f"--only-middle, --only-tail: model {id} has one part")
            found[id] = cuts
    return found


def _next(text: str) -> NextServer:
    """What ``--next`` says. Raises SpecError."""
    name, equals, address = text.rpartition("=")
    try:
        return NextServer(name if equals else address, (address,))
    except SpecError as error:
        raise SpecError(f"--next {text}: {error}") from error


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
