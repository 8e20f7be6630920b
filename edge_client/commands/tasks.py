"""Implement commands that run one task, print its result, and write it as JSON. One function per command."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from edge_client.commands import common
from edge_client.commands.common import (
    check_json_target,
    chosen,
    keywords,
    needed,
    power_of,
    say,
    screen_width,
    show,
    show_bench,
    write_json,
)
from edge_client.commands.feed import choice_of, cut_of, find, load
from edge_client.settings import NONE
from shared_hooks.errors import CutRefused, HookRefused, SpecError

if TYPE_CHECKING:
    from edge_client.tasks.plan import Planned
    from edge_client.tasks.plan_generation import PlannedGeneration
    from edge_client.tasks.sweep import Swept
    from edge_client.tasks.verify import Verified
    from edge_client.user_input import LoadedModel
    from edge_client.witness import WitnessComparison
    from shared_hooks import LayerInfo

NARROWEST: Final = 40
WIDTH: Final = 80
"""Width of sentences; a table is as wide as its cells."""

# a task is imported when its command runs: each imports libraries of its own


def calibrate(options: argparse.Namespace) -> int:
    """Measure the accuracy that every codec costs at every cut, on the user's own inputs."""
    from edge_client.tasks.calibrate import calibrate

    check_json_target(options.json)
    found = calibrate(choice_of(options), options.input, **keywords(options, calibrate), say=say)
    for text in found.warnings:
        say(f"warning: {text}")
    show(options, found.as_dict(), found.text())
    return common.OK


def learn(options: argparse.Namespace) -> int:
    """Train a codec for one cut here; return exit status 1 if none met the goal."""
    from edge_client.tasks.learn import learn

    check_json_target(options.json)
    found = learn(choice_of(options), options.input, options.split, **keywords(options, learn), say=say)
    for text in found.warnings:
        say(f"warning: {text}")
    show(options, found.as_dict(), found.text())
    return common.OK if found.met else common.SOME_FAILED


def leakage(options: argparse.Namespace) -> int:
    """Measure what an attacker reads from what crosses, at every cut."""
    from edge_client.tasks.leakage import leakage

    check_json_target(options.json)
    found = leakage(choice_of(options), options.input, **keywords(options, leakage), say=say)
    for text in found.warnings:
        say(f"warning: {text}")
    show(options, found.as_dict(), found.text())
    return common.OK


def prune(options: argparse.Namespace) -> int:
    """Score a layer's channels, evaluate every choice, write masks and smaller models, measure them."""
    from edge_client.screen import one_line
    from edge_client.tasks.prune import prune

    check_json_target(options.json)
    if options.selection is not None:
        raise SpecError("--selection: prune begins with the whole model")
    found = prune(choice_of(options), options.split, options.input, **keywords(options, prune))
    show(options, found.as_dict(), found.text())
    if options.json != "-":
        for name, why in found.report.trial.unavailable.items():
            say(f"{name} is not available: {one_line(why)}")
    return common.OK if found.all_exact else common.SOME_FAILED


def profile(options: argparse.Namespace) -> int:
    """Measure where this side's (and the server's) time, memory and energy go, by layer; return status 3 if the
    server's profile could not be had.
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
    """Put an open load on a server. Results before Ctrl-C, or before the server was lost, are written."""
    from edge_client.tasks.bench import bench

    common.check_provider(options)

    return show_bench(
        options,
        lambda: bench(needed(options), choice_of(options), options.input, say=say, **keywords(options, bench)),
    )


def hierarchy(options: argparse.Namespace) -> int:
    """Show a model's modules and what of them ran, and write its ONNX files with every node tagged."""
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
    """Export heads as ONNX files, for devices without PyTorch; return exit status 1 if a cut was refused."""
    from edge_client.tasks.export import export

    check_json_target(options.json)
    inputs = find(options.input) if options.input else None
    found = export(choice_of(options), inputs, **keywords(options, export))
    show(options, {"folder": str(found.folder), "heads": found.rows()}, found.text())
    return common.OK if found.ok else common.SOME_FAILED


def plan(options: argparse.Namespace) -> int:
    """Predict every cut on this device, this link and this server, and choose the best."""
    from edge_client.planning.partitioners import partitioners
    from edge_client.tasks.plan import plan

    if options.list_partitioners:
        print("\n".join(f"{name}: {about}" for name, about in partitioners().items()), file=options.stdout)
        return common.OK
    check_json_target(options.json)
    if options.generate:
        return _print(_generation(options), options)
    server = chosen(options, chain=True) or NONE
    if "," in server:
        return _plan_chain(server.split(","), options)
    whole = plan(
        server,
        choice_of(options),
        find(options.input) if options.input else None,
        power=power_of(options),
        say=say,
        **keywords(options, plan, "power"),
    )
    if options.report:
        whole.write_page(options.report)
    return _print(whole, options)


def _print(found: Planned | PlannedGeneration, options: argparse.Namespace) -> int:
    if options.json:
        write_json(found.as_dict(explanation=options.explain), options.json, options.stdout)
    if options.json != "-":
        print(found.text(options.top, screen_width()))
        if options.explain:
            print(f"\n{found.explain()}")
    return common.OK


def _plan_chain(servers: list[str], options: argparse.Namespace) -> int:
    """Find the best cuts along a chain of servers."""
    from edge_client.tasks.plan import plan_chain

    names = "edge_profile cloud_profile max_bytes_per_second input max_edge_memory min_accuracy rate uplink leakage top"
    names += " report"
    given = [name for name in names.split() if getattr(options, name, None)]
    given += ["objective"] if options.objective != "latency" else []
    given += ["codec"] if options.codec != "raw" else []
    if given:
        raise SpecError(
            f"--{given[0].replace('_', '-')} is not for a chain of servers, of which the latency is planned"
        )
    correct = options.correct is not False
    more = keywords(options, plan_chain, "correct")
    found = plan_chain(servers, choice_of(options), correct=correct, say=say, **more)
    show(options, found.as_dict(), found.text())
    return common.OK


def _generation(options: argparse.Namespace) -> PlannedGeneration:
    from edge_client.tasks.plan_generation import plan_generation, write_page

    alone = {
        name: getattr(options, name) for name in ("edge_profile", "cloud_profile", "max_bytes_per_second", "input")
    }
    alone |= {"correct": options.correct, "edge_speed": options.edge_speed != 1}
    wrong = next((name for name, value in alone.items() if value), None)
    if wrong:
        raise SpecError(f"--{wrong.replace('_', '-')} is not for --generate")
    found = plan_generation(
        chosen(options) or NONE,
        choice_of(options),
        goal=options.generate,
        power=power_of(options),
        say=say,
        **keywords(options, plan_generation, "goal", "power"),
    )
    if options.report:
        write_page(found, options.report)
    return found


def sweep(options: argparse.Namespace) -> int:
    """Run real inputs through every cut that is not measured yet, and write tables and a page."""
    from edge_client.core import CONNECTION_ERRORS
    from edge_client.sweeping import settings
    from edge_client.tasks.sweep import sweep

    settings.check()
    check_json_target(options.json)
    found = sweep(
        chosen(options) or NONE,
        choice_of(options),
        options.input,
        say=_print_journal,
        **keywords(options, sweep),
    )
    status = _status(found)
    if isinstance(found.failure, CONNECTION_ERRORS):
        say(found.ended or "")
    if found.summary is None:
        say(f"{found.text()}; the same command tries again")
        return status
    print(found.text(), flush=True)
    print(f"report: {found.report}", flush=True)
    if found.ended is not None:
        inputs = f"{found.measured} of {found.inputs} inputs are measured"
        say(f"{found.ended}: {inputs}; the same command continues where it stopped")
    if options.json:
        write_json({**found.as_dict(), "exit_status": status}, options.json, options.stdout)
    return status


def _status(found: Swept) -> int:
    if isinstance(found.failure, KeyboardInterrupt):
        return common.INTERRUPTED
    if isinstance(found.failure, HookRefused):
        return common.USAGE
    if found.failure is not None:
        return common.CONNECTION
    return common.SOME_FAILED if any(way.failed for way in found.ways) else common.OK


def _print_journal(line: str) -> None:
    """Print the journal to standard output, all else to standard error."""
    if line.startswith(("warning:", "starting")):
        say(line)
    else:
        print(line, flush=True)


def layers(options: argparse.Namespace) -> int:
    """List the layers of a model in execution order, and where it can be cut; or explain one cut."""
    from edge_client.screen import printable
    from edge_client.tasks.layers import layers

    check_json_target(options.json)
    if options.explain is not None:
        known, text, status = _explained(load(choice_of(options), options.input), options.explain, options.all)
        if options.json:
            write_json(known, options.json, options.stdout)
        if options.json != "-":
            print("\n".join(map(printable, text.splitlines())))
        return status
    found = layers(choice_of(options), find(options.input) if options.input else None)
    if options.json:
        write_json(
            {
                "model": found.model,
                "plan_digest": found.plan_digest,
                "can_split": len(found.cuts),
                "parameters": found.parameters,
                "weight_bytes": found.weight_bytes,
                "macs": found.macs,
                "layers": found.rows(),
            },
            options.json,
            options.stdout,
        )
    if options.json != "-":
        print(found.text())
    return common.OK


def _explained(loaded: LoadedModel, cut: str, everything: bool) -> tuple[dict[str, Any], str, int]:
    """Explain ``cut``, as JSON data and as text, with the exit status; for a refused one its neighbours."""
    with loaded.wrapped as wrapped:
        known_layers = wrapped.layers
        try:
            calls = [cut] if any(one.name == cut for one in known_layers) else cut.split(",")
            cuts = [cut_of(one, wrapped, "--explain") for one in calls]
            explanation = wrapped.explain(cuts if len(cuts) > 1 else cuts[0], *loaded.args, **loaded.kwargs)
        except CutRefused as error:
            reason = str(error).removeprefix(f"--explain {cut}: ")
            near = _nearest(known_layers, cut)
            text = f"{loaded.spec.model_id}: {reason}\nnearest cuts: {', '.join(near) or 'none'}"
            return {"model": loaded.spec.model_id, "refused": reason, "nearest": near}, text, common.SOME_FAILED
    known = {"model": loaded.spec.model_id, "plan_digest": loaded.plan_digest, **dataclasses.asdict(explanation)}
    return known, explanation.text(max(shutil.get_terminal_size().columns, NARROWEST), everything=everything), common.OK


def _nearest(layers: tuple[LayerInfo, ...], wanted: str) -> list[str]:
    """Return the names of the cuts next to one that is refused, before and after it."""
    number = next((one.layer_id for one in layers if wanted in (one.name, str(one.layer_id))), -1)
    before = next((one.name for one in reversed(layers[: max(number, 0)]) if one.can_split), None)
    after = next((one.name for one in layers[number + 1 :] if one.can_split), None)
    return [name for name in (before, after) if name is not None]


def verify(options: argparse.Namespace) -> int:
    """Verify every cut against the whole model, here or through a server; return status 1 unless each is exact or
    refused.
    """
    from edge_client.tasks.verify import Verified, verify

    check_json_target(options.json)
    server = chosen(options, chain=True) or NONE
    found = verify(
        server.split(",") if "," in server else server,
        choice_of(options),
        find(options.input) if options.input else None,
        **keywords(options, verify),
    )
    if options.json != "-":
        print(_verdict(found.found) if isinstance(found.found, Verified) else found.text())
    if options.json:
        write_json(found.as_dict(), options.json, options.stdout)
    return common.OK if found.ok else common.SOME_FAILED


def _verdict(found: Verified) -> str:
    return "\n".join(
        line if "\n" in line else textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in _lines(found)
    )


def _lines(found: Verified) -> Iterator[str]:
    from edge_client.commands.report import table
    from edge_client.screen import printable

    rows = [[str(one.layer_id), one.name, "refused", one.reason] for one in found.cuts if one.refused]
    for one in found.wrong:
        why = (
            one.reason or f"differs by {_apart(one.here)} from the whole model here, by {_apart(one.there)} from there"
        )
        rows.append([str(one.layer_id), one.name, "WRONG", why])
    if rows:
        yield table(["id", "name", "cut", "reason"], rows, right=(0,))
        yield ""
    exact = sum(one.is_exact for one in found.answered)
    yield (
        f"{len(found.answered)} cuts answered, {exact} of them bit for bit as the whole model on one of the two sides, "
        f"{sum(one.refused for one in found.cuts)} refused"
    )
    if found.servers > 1:
        yield "along the chain each was the first cut once, and the last"
    elif found.sides is None:
        yield "the whole model on the server is not known: it may not be cut before its first layer"
    elif found.sides.bits:
        yield "the whole model gives the same bits on both sides"
    else:
        yield f"the whole model differs between the sides by {_apart(found.sides)}"
    if found.largest:
        top1 = "" if found.top1 is None else f"; top-1 the same in {100 * found.top1:.4g} % of its rows"
        yield f"the answer furthest from the whole model here: {found.largest:.2g} of the output's scale{top1}"
    if found.notes:
        yield f"without any effect on results: {'; '.join(map(printable, found.notes))}"
    if found.unlike:
        unlike = printable("; ".join(found.unlike))
        allowed = f"up to {found.limit:.2g} of the output's scale is allowed"
        yield f"{allowed}, for the last bits are not promised between these machines ({unlike})"
    yield "ok" if found.ok else "NOT OK"


def _apart(found: WitnessComparison | None) -> str:
    return "nothing" if found is None or found.bits else f"{found.largest:.2g} of the output's scale"


COMMANDS = {
    one.__name__: one
    for one in (calibrate, learn, leakage, prune, profile, bench, hierarchy, export, plan, sweep, layers, verify)
}
