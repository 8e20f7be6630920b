"""``make compose``: docker-compose.yml on a real engine. Builds, runs, looks inside, and takes everything down.

Each line it prints is a claim that was checked; exit status 0 only if all hold. Base image, index and torch are given
by options, so that it also works where the hub or the default index cannot be reached (docs/containers.md).
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.engine import BUILD_SECONDS, ROOT, ComposeProject, EngineFailed, until

USER = 10001
CLOUD, EDGE = "isthmus-cloud", "isthmus-edge"
SERVERS = {"grpcio-reflection", "prometheus-client"}
"""What the extra `cloud` adds: an edge's image without them is no server's under an edge's name."""
COMPILERS = "gcc g++ cc c++ clang as ld make ninja rustc go nvcc".split()
CACHES = "/root/.cache /var/cache/apt/archives/*.deb /var/lib/apt/lists/*Packages* /build /tmp/pip*".split()
IMAGES = ROOT / "shared_hooks" / "models" / "digits" / "images"
WEIGHTS = ROOT / "shared_hooks" / "models" / "digits" / "weights.safetensors"
HEALTHY_SECONDS, DEMO_START_SECONDS, DEMO_SECONDS = 300.0, 600.0, 90.0


class Check:
    """The claims, one after the other; the first that does not hold is `EngineFailed`."""

    def __init__(self, engine: ComposeProject) -> None:
        self.engine, self._began = engine, time.monotonic()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s  {text}", flush=True)

    def claim(self, text: str, holds: bool, otherwise: object = "") -> None:
        if not holds:
            raise EngineFailed(f"not so: {text}{f': {otherwise}' if otherwise != '' else ''}")
        self.say(f"ok  {text}")

    def built(self, services: Sequence[str]) -> None:
        self.engine.compose("build", *services, timeout=BUILD_SECONDS)
        self.say(f"built: {', '.join(services)}")

    def image(self, name: str) -> None:
        """What is in it, and what is not."""
        self.say(f"{name}: {self.engine.inspect(name)['Size'] / 1e6:.0f} MB")
        look = f"for one in {' '.join(COMPILERS)}; do command -v $one; done; ls -d {' '.join(CACHES)} 2>/dev/null; true"
        self.claim(f"{name}: no compiler, no cache", not (found := self._in(name, "sh", "-c", look)), found)
        tests = "find /opt/isthmus -type d ( -name tests -o -name test )"
        self.claim(f"{name}: no tests", not (found := self._in(name, *tests.split())), found)
        label = self.engine.inspect(name)["Config"]["Labels"]["io.isthmus.sbom"]
        listed = {one["name"]: one["version"] for one in json.loads(self._in(name, "cat", label))["components"]}
        code = "import torch; print(torch.__version__)"
        torch = self._in(name, "python3", "-c", code)
        same = listed.get("torch") == torch and "isthmus" in listed
        self.claim(f"{name}: {label} lists {len(listed)} packages, torch {torch} among them", same, listed)
        wanted, there = SERVERS if name == CLOUD else set(), SERVERS & listed.keys()
        self.claim(f"{name}: of a server's packages {', '.join(sorted(wanted)) or 'none'}", there == wanted, there)

    def _in(self, image: str, *words: str) -> str:
        return self.engine.docker("run", "--rm", "--network", "none", "--entrypoint", words[0], image, *words[1:])

    def confined(self, service: str, status: str) -> None:
        """``status``: of a process in it, as /proc tells it."""
        facts = dict(re.findall(r"^(\w+):\s*(\S+)", status, re.MULTILINE))
        shown = f"user {facts['Uid']}, capabilities {facts['CapEff']}, new privileges {facts['NoNewPrivs']}"
        right = (facts["Uid"], int(facts["CapEff"], 16), facts["NoNewPrivs"]) == (str(USER), 0, "1")
        self.claim(f"{service}: an ordinary user without capabilities ({USER}, 0, none new)", right, shown)

    def read_only(self, service: str, wrote: tuple[int, str]) -> None:
        reported = wrote[0] != 0 and "Read-only file system" in wrote[1]
        self.claim(f"{service}: its file system is read-only", reported, wrote[1])

    def health(self, service: str) -> str:
        return str(self.engine.inspect(self.engine.container(service))["State"]["Health"]["Status"])

    def becomes(self, service: str, wanted: str, seconds: float = HEALTHY_SECONDS) -> None:
        seen: list[str] = []

        def there() -> bool:
            now = self.health(service)
            if now not in seen:
                seen.append(now)
            return now == wanted

        until(f"{service} becomes {wanted}", seconds, there)
        self.claim(f"{service}: {' -> '.join(seen)}", True)


def server_and_edge(check: Check) -> None:
    """The two services that need no profile."""
    engine = check.engine
    engine.compose("up", "-d", "cloud")
    check.becomes("cloud", "healthy")
    cloud = engine.container("cloud")
    check.confined("cloud", engine.docker("exec", cloud, "cat", "/proc/1/status"))
    check.read_only("cloud", engine.attempt("exec", cloud, "touch", "/opt/isthmus/new"))

    engine.compose("up", "-d", "edge")
    edge = engine.container("edge")
    status, log = int(engine.docker("wait", edge)), engine.attempt("logs", edge)[1]
    check.claim("edge: exit status 0", status == 0, f"{status}\n{log}")
    expected = len(list(IMAGES.glob("*.png")))
    answered = len(re.findall(r"^\S+\.png ", log, re.MULTILINE))
    check.claim(f"edge: {expected} of {expected} images answered", answered == expected, f"{answered}\n{log}")
    run = ("run", "--rm", "-T", "--no-deps", "--entrypoint")
    check.confined("edge", engine.compose(*run, "cat", "edge", "/proc/self/status"))
    check.read_only("edge", engine.attempt_compose(*run, "touch", "edge", "/opt/isthmus/new"))
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "own.safetensors"
        weights.write_bytes(WEIGHTS.read_bytes())
        weights.chmod(0o600)
        mounted = (*run[:-1], "-v", f"{weights}:/own.safetensors:ro", "edge", "verify", "--weights", "/own.safetensors")
        status, said = engine.attempt_compose(*mounted)
    reported = status == 2 and "/own.safetensors cannot be read: permission" in said
    check.claim("edge: weights of mode 0600 are reported as unreadable, not as missing", reported, said)

    engine.docker("kill", "--signal", "STOP", cloud)
    check.becomes("cloud", "unhealthy")
    engine.docker("kill", "--signal", "CONT", cloud)
    check.becomes("cloud", "healthy")
    engine.compose("stop", "cloud")
    state, log = engine.inspect(cloud)["State"], engine.attempt("logs", cloud)[1]
    check.claim("cloud: stopped by SIGTERM, drained, status 0", state["ExitCode"] == 0, f"{state['ExitCode']}\n{log}")


def monitoring(check: Check, port: int, grafana_port: int | None) -> None:
    """Prometheus scrapes the server while an edge asks it; Grafana, where there is an image, has the dashboards."""
    engine = check.engine
    engine.compose("up", "-d", "prometheus", *(["grafana"] if grafana_port else []))
    engine.compose("up", "-d", "cloud")
    check.becomes("cloud", "healthy")
    engine.compose("up", "-d", "--force-recreate", "--no-deps", "edge")
    status = engine.docker("wait", engine.container("edge"))
    check.claim("edge: exit status 0", status == "0", status)
    expected = len(list(IMAGES.glob("*.png")))

    def counted() -> bool:
        query = urllib.parse.urlencode({"query": "sum(isthmus_request_success_total)"})
        found = _get(port, f"/api/v1/query?{query}")
        return found is not None and [one["value"][1] for one in found["data"]["result"]] == [str(expected)]

    until(f"Prometheus counts {expected} answers", 60, counted)
    check.claim(f"Prometheus counts {expected} answers of the server", True)
    targets = _get(port, "/api/v1/targets")["data"]["activeTargets"]
    check.claim(f"its targets are up: {len(targets)}", {one["health"] for one in targets} == {"up"}, targets)
    if grafana_port:
        until("Grafana answers", 90, lambda: _get(grafana_port, "/api/health"))
        found = until("Grafana has dashboards", 60, lambda: _get(grafana_port, "/api/search?type=dash-db"))
        check.claim(f"Grafana has {', '.join(one['title'] for one in found)}", True)
    else:
        check.say("--  Grafana: not run (--grafana)")


def demo(check: Check, seconds: float) -> None:
    """Two edges on links whose rate changes: both must choose a cut, move it, and go on."""
    engine, edges = check.engine, ("edge-a", "edge-b")
    engine.compose("up", "-d", *edges)
    check.claim("cloud-demo, link-a and link-b became healthy, edge-a and edge-b began", True)

    def log(service: str) -> list[str]:
        return engine.attempt("logs", "-t", engine.container(service))[1].splitlines()

    def moved() -> bool:
        for one in edges:
            if not engine.inspect(engine.container(one))["State"]["Running"]:
                raise EngineFailed(f"{one} ended: {log(one)}")
        return all(sum("moved=True" in line for line in log(one)) > 1 for one in edges)  # the first is a choice

    until("both edges move their cut", DEMO_START_SECONDS, moved, every=2)
    time.sleep(seconds)
    moved()
    reported = [(line, who) for who in ("link-a", *edges, "link-b") for line in log(who)]
    for line, who in sorted(reported):
        found = re.fullmatch(
            r"(\S+) (link: .*|.*auto: choice: candidate=(\S+), moved=True, reason=(.*), predicted_ms.*)", line
        )
        if found:
            what = f"{found[3]}: {found[4]}" if found[3] else found[2]
            print(f"           {found[1][11:21]}  {who:<7} {what}")
    for one in edges:
        check.confined(one, engine.docker("exec", engine.container(one), "cat", "/proc/1/status"))
        check.claim(f"{one}: its cut moved {sum('moved=True' in line for line in log(one)) - 1} times", moved())


def chain(check: Check) -> None:
    """A camera asks a gateway, which asks a server: each on a link of its own rate."""
    engine = check.engine
    engine.compose("up", "-d", "camera")
    camera = engine.container("camera")
    check.claim("gpu, link-gateway, gateway and link-camera became healthy, camera began", True)
    status, log = int(engine.docker("wait", camera)), engine.attempt("logs", camera)[1]
    check.claim("camera: exit status 0", status == 0, f"{status}\n{log}")
    expected = len(list(IMAGES.glob("*.png")))
    answered = len(re.findall(r"^\S+\.png ", log, re.MULTILINE))
    check.claim(f"camera: {expected} of {expected} images answered", answered == expected, f"{answered}\n{log}")
    for service in ("gateway", "gpu"):
        check.confined(service, engine.docker("exec", engine.container(service), "cat", "/proc/1/status"))
    engine.compose("stop", "gpu")
    status, log = engine.attempt_compose("run", "--rm", "-T", "--no-deps", "camera")
    check.claim("without gpu: refused, and gpu is named", status != 0 and "gpu: " in log, f"{status}\n{log}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.compose_check", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--compose", default="", help='"docker compose" or "docker-compose"; default: what there is')
    parser.add_argument("--base", help="base image of both sides: Python 3.10 or later, and pip")
    parser.add_argument("--link-base", help="base image of the demo's links: Debian's, with apt")
    parser.add_argument("--pip-flags", help="for pip in the builds, e.g. another index")
    parser.add_argument("--torch", help="another release or build of torch, e.g. 2.13.0+cpu")
    parser.add_argument("--constraints", help="another file of pins; /dev/null: none")
    parser.add_argument(
        "--profile", action="append", default=[], choices=["monitoring", "demo", "chain"], help="check this, too"
    )
    parser.add_argument("--profiles-only", action="store_true", help="only these")
    parser.add_argument("--prometheus", help="its image")
    parser.add_argument("--grafana", action="store_true", help="run Grafana, too")
    parser.add_argument("--seconds", type=float, default=DEMO_SECONDS, help=f"of the demo, default {DEMO_SECONDS:.0f}")
    parser.add_argument("--project", default="isthmus-check", help="default isthmus-check")
    options = parser.parse_args(arguments)
    ports = _free_port(), _free_port()
    reported = {
        "BASE": options.base,
        "LINK_BASE": options.link_base,
        "PIP_FLAGS": options.pip_flags,
        "TORCH": options.torch,
        "CONSTRAINTS": options.constraints,
        "PROMETHEUS_IMAGE": options.prometheus,
        "PROMETHEUS_PORT": str(ports[0]),
        "GRAFANA_PORT": str(ports[1]),
    }
    given = {name: value for name, value in reported.items() if value is not None}
    try:
        engine = ComposeProject(options.compose, options.project, given, options.profile)
        check = Check(engine)
        check.say(engine.versions())
        engine.down()
        try:
            check.built(["cloud", "edge"])
            for name in (CLOUD, EDGE):
                check.image(name)
            if not options.profiles_only:
                server_and_edge(check)
            if "monitoring" in options.profile:
                monitoring(check, ports[0], ports[1] if options.grafana else None)
            if "demo" in options.profile:
                check.built(["cloud-demo", "edge-a", "edge-b", "link-a", "link-b"])
                demo(check, options.seconds)
            if "chain" in options.profile:
                check.built(["gpu", "gateway", "camera", "link-gateway", "link-camera"])
                chain(check)
        finally:
            engine.down()
        check.claim("everything is down: no container, network or volume left", not engine.left(), engine.left())
    except EngineFailed as error:
        print(f"compose: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("compose: interrupted", file=sys.stderr)
        return 130
    return 0


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _get(port: int, path: str) -> Any:
    """The JSON that a service on loopback answers; None while it does not."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return json.load(answer)
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    sys.exit(main())
