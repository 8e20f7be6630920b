"""Commands that are one task: run it, print what it found, write it as JSON. A function a command."""

from __future__ import annotations

import argparse

from edge_client.commands import common
from edge_client.commands.common import check_json_target, chosen, keywords, needed, say, screen_width, show, show_bench
from edge_client.commands.feed import choice_of, find
from edge_client.settings import NONE
from shared_hooks.errors import SpecError

# a task is imported when its command runs: each brings libraries of its own


def calibrate(options: argparse.Namespace) -> int:
    """What every codec costs in answers, at every cut, on the user's own inputs."""
    from edge_client.tasks.calibrate import calibrate

    check_json_target(options.json)
    found = calibrate(choice_of(options), options.input, **keywords(options, calibrate), say=say)
    for text in found.warnings:
        say(f"warning: {text}")
    show(options, found.as_dict(), found.text())
    return common.OK


def learn(options: argparse.Namespace) -> int:
    """A codec for one cut, trained here; exit status 1 where none came within what was wanted."""
    from edge_client.tasks.learn import learn

    check_json_target(options.json)
    found = learn(choice_of(options), options.input, options.split, **keywords(options, learn), say=say)
    for text in found.warnings:
        say(f"warning: {text}")
    show(options, found.as_dict(), found.text())
    return common.OK if found.met else common.SOME_FAILED


def leakage(options: argparse.Namespace) -> int:
    """What an attacker reads from what crosses, at every cut."""
    from edge_client.tasks.leakage import leakage

    check_json_target(options.json)
    found = leakage(choice_of(options), options.input, **keywords(options, leakage), say=say)
    for text in found.warnings:
        say(f"warning: {text}")
    show(options, found.as_dict(), found.text())
    return common.OK


def prune(options: argparse.Namespace) -> int:
    """Score a layer's channels, judge every choice, write masks and smaller models, measure them."""
    from edge_client.screen.text import one_line
    from edge_client.tasks.prune import prune

    check_json_target(options.json)
    if options.selection is not None:
        raise SpecError("--selection: prune begins with the whole model")
    serve = None if options.serve else False
    more = keywords(options, prune, "serve")
    found = prune(choice_of(options), options.split, options.input, serve=serve, **more)
    show(options, found.as_dict(), found.text())
    if options.json != "-":
        for name, why in found.report.trial.unavailable.items():
            say(f"{name} is not available: {one_line(why)}")
    return common.OK if found.all_exact else common.SOME_FAILED


def profile(options: argparse.Namespace) -> int:
    """Where this side's (and the server's) time, memory and energy go, layer by layer; status 3 where the server's
    profile could not be had.
    """
    from edge_client.tasks.profile import profile

    server = None if options.side == "edge" else chosen(options)
    check_json_target(options.json)
    inputs = find(options.input) if options.input else None
    found = profile(server or NONE, choice_of(options), inputs, say=say, **keywords(options, profile))
    if (error := found.failure) is not None:
        say(f"error: {type(error).__name__}: {error}")
    for one in found.profiles:
        if one.whole_energy.value is None:
            say(f"{one.side}: {one.whole_energy.note}")
    show(options, found.as_dict(), found.text(screen_width()))
    return common.OK if found.failure is None else common.CONNECTION


def bench(options: argparse.Namespace) -> int:
    """An open load on a server. What was measured before Ctrl-C, or before the server went, is written."""
    from edge_client.tasks.bench import bench

    common.check_provider(options)

    return show_bench(
        options,
        lambda: bench(needed(options), choice_of(options), options.input, say=say, **keywords(options, bench)),
    )


def hierarchy(options: argparse.Namespace) -> int:
    """What a model is made of, what of it ran, and its ONNX files with every node tagged."""
    from edge_client.tasks.hierarchy import hierarchy
    from edge_client.tasks.subject import print_tree

    check_json_target(options.json)
    inputs = find(options.input) if options.input else None
    found = hierarchy(choice_of(options), inputs, **keywords(options, hierarchy))
    if options.json != "-":
        print_tree(found.map, options.stdout)
    show(options, found.as_dict(), "\n" + "\n".join(found.lines()))
    return common.OK if found.ok else common.SOME_FAILED


def export(options: argparse.Namespace) -> int:
    """Heads as ONNX files, for devices without PyTorch; exit status 1 where a cut was refused."""
    from edge_client.tasks.export import export

    check_json_target(options.json)
    inputs = find(options.input) if options.input else None
    found = export(choice_of(options), inputs, **keywords(options, export))
    show(options, {"folder": str(found.folder), "heads": found.rows()}, found.text())
    return common.OK if found.ok else common.SOME_FAILED


COMMANDS = {one.__name__: one for one in (calibrate, learn, leakage, prune, profile, bench, hierarchy, export)}
