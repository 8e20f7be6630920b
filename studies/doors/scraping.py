"""A real Prometheus scrapes a server, and is asked for each metric of the page and each panel of the dashboard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from studies.doors.process import ROOT, Server

BOARD = ROOT / "deploy" / "grafana" / "dashboards" / "isthmus.json"
SECONDS = 120.0
WITHOUT = {"Energy an answer", "Refusals a second, by limit"}
"""Panels that may have no data here: there is no sensor, and no limit is met."""
VARIABLES = {"$__rate_interval": "10s", "$model": ".*", "$job": ".*"}


def scrape(server: Server, folder: Path, port: int) -> dict[str, Any]:
    """Raises RuntimeError, naming the metric or panel, and without Prometheus."""
    if shutil.which("prometheus") is None:
        raise RuntimeError("prometheus is not installed (apt install prometheus)")
    config = folder / "prometheus.yml"
    target = {"job_name": "isthmus", "scrape_interval": "1s", "static_configs": [{"targets": [server.metrics]}]}
    config.write_text(json.dumps({"scrape_configs": [target]}))  # JSON is YAML
    words = ["--config.file", str(config), "--storage.tsdb.path", str(folder / "tsdb")]
    with (folder / "prometheus.log").open("wb") as log:
        words += ["--web.listen-address", f"127.0.0.1:{port}"]
        process = subprocess.Popen(["prometheus", *words], stdout=log, stderr=log)
    try:
        return _asked(f"http://127.0.0.1:{port}", server)
    finally:
        process.terminate()
        process.wait(30)


def _asked(url: str, server: Server) -> dict[str, Any]:
    _until(lambda: _query(url, "count_over_time(isthmus_workers[1m]) >= 4"))
    page = urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=30).read().decode()
    names = sorted(set(re.findall(r"^((?:isthmus|process)_\w+)[{ ]", page, re.MULTILINE)))
    missing = [name for name in names if not _query(url, name)]
    if missing:
        raise RuntimeError(f"Prometheus has not {', '.join(missing)}")
    panels: dict[str, int] = {}
    for panel in json.loads(BOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"]
            for name, value in VARIABLES.items():
                text = text.replace(name, value)
            panels[panel["title"]] = panels.get(panel["title"], 0) + len(_query(url, text))
    explained(panels)
    return {
        "version": _version(),
        "check": _check(page),
        "metrics": len(names),
        "metrics that a query answers": len(names) - len(missing),
        "panels": len(panels),
        "panels with data": sum(found > 0 for found in panels.values()),
        "panels without": sorted(title for title, found in panels.items() if not found),
    }


def explained(panels: Mapping[str, int]) -> None:
    """``panels``: how many series each has. Raises RuntimeError, naming those without that should have some."""
    silent = {title for title, found in panels.items() if not found} - WITHOUT
    if silent or not panels:
        raise RuntimeError(f"panels without data: {', '.join(sorted(silent)) or 'there are none at all'}")


def _version() -> str:
    reported = subprocess.run(["prometheus", "--version"], capture_output=True, text=True)
    return (reported.stdout or reported.stderr).split("\n")[0]


def _check(page: str) -> str:
    """What promtool has against the page; its advice on names is advice."""
    made = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True)
    return (made.stdout + made.stderr).strip() or "nothing"


def _query(url: str, text: str) -> list[Any]:
    """Raises RuntimeError for what Prometheus does not understand."""
    asked = f"{url}/api/v1/query?{urllib.parse.urlencode({'query': text})}"
    try:
        found = json.load(urllib.request.urlopen(asked, timeout=30))
    except urllib.error.HTTPError as error:
        if error.code == 503:  # it is not up
            raise
        raise RuntimeError(f"{text}: {error.read()!r:.500}") from error
    return list(found["data"]["result"])


def _until(claim: Any) -> None:
    end = time.monotonic() + SECONDS
    while True:
        try:
            if claim():
                return
        except OSError:  # it is not up
            pass
        if time.monotonic() > end:
            raise RuntimeError("Prometheus has scraped nothing")
        time.sleep(0.2)
