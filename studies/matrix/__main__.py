"""``make matrix``: every cut of four models, from edges with other torch, Python and processors, at one server."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from edge_client.model_choice import ModelChoice
from edge_client.process import local_server
from studies.matrix.cell import ROOT, SPECS, Cell, cell
from studies.matrix.edges import Edge
from studies.matrix.table import as_text


def main() -> int:
    """The exit status: 0 if every cell works."""
    parser = argparse.ArgumentParser(prog="python -m studies.matrix", description=__doc__)
    parser.add_argument(
        "edges",
        nargs="*",
        metavar="NAME=COMMAND",
        help="an edge's Python; default: this one (studies/matrix/arm64.sh)",
    )
    text = "of the server, for edges that reach it through a tunnel (docs/agreement.md); default: any free port"
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help=text)
    parser.add_argument("--models", nargs="+", choices=SPECS, default=list(SPECS), metavar="NAME")
    parser.add_argument("--json", type=Path, help="where the result goes; edges that are in it already are kept")
    options = parser.parse_args()
    edges = [Edge.of(text) for text in options.edges or [f"here={sys.executable}"]]
    os.chdir(ROOT)
    known: dict[str, Any] = {"edges": {}, "cells": []}
    if options.json and options.json.exists():
        known = json.loads(options.json.read_text())
    cells = [Cell(**{**one, "notes": tuple(one["notes"]), "wrong": tuple(one["wrong"])}) for one in known["cells"]]
    about: dict[str, Any] = known["edges"]
    first, *others = (SPECS[name] for name in options.models)
    more = [word for other in others for word in ("--model", other)]
    with local_server(ModelChoice(first, threads=1), listen=options.listen, arguments=more) as address:
        for edge in edges:
            about[edge.name] = {**edge.about(), "date": time.strftime("%Y-%m-%d")}
            for model in options.models:
                print(f"{edge.name}: {model} ...", end=" ", flush=True)
                found = cell(edge, model, address)
                print(found.error or f"{found.answered} of {found.cuts - found.refused}; {found.apart:.1e}", flush=True)
                cells = [one for one in cells if (one.edge, one.model) != (edge.name, model)] + [found]
                _keep(options.json, about, cells)
    print("\n" + as_text(about, cells))
    return 0 if all(one.ok for one in cells) else 1


def _keep(path: Path | None, about: dict[str, Any], cells: list[Cell]) -> None:
    if path is not None:
        reported = {"server": Edge("here", (sys.executable,)).about(), "edges": about}
        path.write_text(json.dumps({**reported, "cells": [one.as_dict() for one in cells]}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
