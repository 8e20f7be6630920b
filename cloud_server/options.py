"""What the command line of ``cloud-server`` makes of a configuration."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from cloud_server.access import Tls
from cloud_server.arguments import parser as parser
from cloud_server.config import ModelEntry, ServerConfig, read_config
from shared_hooks.config import looks_like_target
from shared_hooks.errors import SpecError
from shared_hooks.models import ModelSpec, Table, load_spec, spec_from_table


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
