"""``edge-client plan``: what every cut takes on this device, this link, this server; and which is best."""

from __future__ import annotations

import argparse

from edge_client.commands import common
from edge_client.commands.common import check_json_target, chosen, keywords, power_of, say, screen_width, write_json
from edge_client.commands.feed import choice_of, find
from edge_client.planning.partitioners import partitioners
from edge_client.settings import NONE
from edge_client.tasks.plan import Planned, plan
from edge_client.tasks.plan_generation import PlannedGeneration, plan_generation, write_page
from shared_hooks.errors import SpecError


def main(options: argparse.Namespace) -> int:
    """Plan, print; exit status."""

    if options.list_partitioners:
        print("\n".join(f"{name}: {about}" for name, about in partitioners().items()), file=options.stdout)
        return common.OK
    check_json_target(options.json)
    if options.generate:
        found = _generation(options)
        if options.report:
            write_page(found, options.report)
        return _print(found, options)
    if options.report:
        raise SpecError("--report is for --generate; edge-client sweep writes one of measured requests")
    whole = plan(
        chosen(options) or NONE,
        choice_of(options),
        find(options.input) if options.input else None,
        power=power_of(options),
        say=say,
        **keywords(options, plan, "power"),
    )
    return _print(whole, options)


def _print(found: Planned | PlannedGeneration, options: argparse.Namespace) -> int:
    if options.json:
        write_json(found.as_dict(explanation=options.explain), options.json, options.stdout)
    if options.json != "-":
        print(found.text(options.top, screen_width()))
        if options.explain:
            print(f"\n{found.explain()}")
    return common.OK


def _generation(options: argparse.Namespace) -> PlannedGeneration:
    alone = {
        name: getattr(options, name) for name in ("edge_profile", "cloud_profile", "max_bytes_per_second", "input")
    }
    alone |= {"correct": options.correct, "edge_speed": options.edge_speed != 1}
    wrong = next((name for name, value in alone.items() if value), None)
    if wrong:
        raise SpecError(f"--{wrong.replace('_', '-')} is not for --generate")
    return plan_generation(
        chosen(options) or NONE,
        choice_of(options),
        draft=options.draft or 0,
        goal=options.generate,
        power=power_of(options),
        say=say,
        **keywords(options, plan_generation, "draft", "goal", "power"),
    )
