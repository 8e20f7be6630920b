"""``edge-client verify``: every cut of a model against the whole model, in this process or through a server."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from edge_client.client import EdgeClient
from edge_client.commands import exits
from edge_client.commands.credentials import credentials_of
from edge_client.commands.loading import choice_of, example_of, load
from edge_client.commands.output import check_json_target, table, write_json
from edge_client.commands.server import chosen, running
from edge_client.screen.progress import progress
from edge_client.screen.text import printable
from edge_client.survey.verified import Verified, verified
from edge_client.transport import ConnectionOptions
from edge_client.witness.comparison import Comparison


def main(options: argparse.Namespace) -> int:
    """Print the verdict (and JSON); status 1 unless every cut is exact or refused."""
    check_json_target(options.json)
    if server := chosen(options):
        with running(server, choice_of(options)) as address:
            return _through(options, address)
    loaded = load(choice_of(options), options.input)
    with loaded.wrapped as wrapped, progress("cuts", len(wrapped.layers) + 1, not options.no_progress) as advance:
        report = wrapped.verify(*loaded.args, on_cut=lambda done, total: advance(""), **loaded.kwargs)
    if options.json != "-":
        bad = [(layer, "refused", layer.reason or "") for layer in report.refused]
        bad += [(layer, "DIFFERS", "the tail's output is not the whole model's") for layer in report.differing]
        if bad:
            rows = [[str(layer.layer_id), layer.name, layer.layer_type, what, why] for layer, what, why in bad]
            print(table(["id", "name", "type", "cut", "reason"], rows, right=(0,)))
            print()
        if not report.input_exact:
            print('the cut at "input" DIFFERS')
        print(
            f"{loaded.spec.model_id}: {len(report.exact)} cuts exact, {len(report.refused)} refused, "
            f"{len(report.differing)} differing: {'ok' if report.ok else 'NOT OK'}"
        )
    if options.json:
        write_json(
            {"model": loaded.spec.model_id, "plan_digest": loaded.plan_digest, **report.as_dict()},
            options.json,
            options.stdout,
        )
    return exits.OK if report.ok else exits.SOME_FAILED


def _through(options: argparse.Namespace, server: str | None) -> int:
    """Every cut over the real link. Status 1 unless every answer is the whole model's, as far as machines allow."""
    connection = ConnectionOptions(credentials=credentials_of(options))
    choice = choice_of(options)
    call = example_of(choice, options.input)
    client = EdgeClient(server, choice, "input", connection=connection)
    with client, progress("cuts", 1 + len(client.prepare().wrapped.layers), not options.no_progress) as advance:
        found = verified(client, *call, on_cut=lambda done, total: advance(""))
    if options.json != "-":
        print("\n".join(_lines(found)))
    if options.json:
        write_json({"model": choice.spec().model_id, "server": server, **found.as_dict()}, options.json, options.stdout)
    return exits.OK if found.ok else exits.SOME_FAILED


def _lines(found: Verified) -> Iterator[str]:
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
    if found.sides is None:
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
        yield f"the last bits are not promised between these machines ({unlike}); {found.limit:.2g} may be"
    yield "ok" if found.ok else "NOT OK"


def _apart(found: Comparison | None) -> str:
    return "nothing" if found is None or found.bits else f"{found.largest:.2g} of the output's scale"
