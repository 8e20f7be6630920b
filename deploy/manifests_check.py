"""``make manifests``: the files for Kubernetes, systemd and Compose, each by a tool that knows them.

    kubectl kustomize                     builds what a cluster would get, each choice of components; lets edges in
    kubeconform, or kubernetes-validate   is each field one that Kubernetes knows (the extra `manifests`)
    systemd-analyze verify, security      the unit, with and without a GPU
    docker compose config                 the file, with all profiles

No cluster and no service is touched. Exit status 0 only if each tool was there and content.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

DEPLOY = Path(__file__).resolve().parent
COMPONENTS = ("gpu", "tls")
MOST_EXPOSED = 2.0
"""As systemd-analyze counts, from 0 to 10; a unit that says nothing has 9.6."""
MOST_EXPOSED_EDGE = 2.5
"""It sees devices: cameras, meters, a GPU."""


class NotContent(Exception):
    """A tool is missing, or found something; the message is for the user."""


def kubernetes(folder: Path) -> Iterator[str]:
    """Every choice of components, built and checked; and one with a mistake, to see that mistakes are seen."""
    for count in range(len(COMPONENTS) + 1):
        for chosen in itertools.combinations(COMPONENTS, count):
            made = _built(chosen, folder)
            edges_reach(made.read_text(encoding="utf-8"))
            kinds = re.findall(r"^kind: (\w+)$", made.read_text(encoding="utf-8"), re.MULTILINE)
            yield f"{_validated(made)}: base {' '.join(chosen)}: {', '.join(kinds)}"
    wrong = folder / "wrong.yaml"
    text = made.read_text(encoding="utf-8")
    wrong.write_text(text.replace("terminationGracePeriodSeconds", "terminationGraceSeconds"), encoding="utf-8")
    try:
        _validated(wrong)
    except NotContent:
        yield "a misspelt field is noticed"
    else:
        raise NotContent("a misspelt field was not noticed")


def _built(chosen: Sequence[str], folder: Path) -> Path:
    """What a kustomization with these components yields, as one file."""
    place = folder / "-".join(("k", *chosen))
    shutil.copytree(DEPLOY / "kubernetes", place)
    file = place / "kustomization.yaml"
    text = file.read_text(encoding="utf-8")
    if "components: []" not in text:
        raise NotContent(f"{file.name} has no line `components: []` to put components into")
    file.write_text(text.replace("components: []", f"components: [{', '.join(chosen)}]"), encoding="utf-8")
    made = place.with_suffix(".yaml")
    made.write_text(_run("kubectl", "kustomize", str(place)), encoding="utf-8")
    return made


def edges_reach(built: str) -> None:
    """Raises `NotContent` where a policy wants the servers' own labels of callers, which no edge has.

    kustomize adds those labels wherever it finds `matchLabels`, there too.
    """
    for policy in (one for one in yaml.safe_load_all(built) if one["kind"] == "NetworkPolicy"):
        for rule in policy["spec"]["ingress"]:
            if "app.kubernetes.io/" in json.dumps(callers := rule.get("from", [])):
                raise NotContent(f"no edge reaches the server: the policy wants its labels of callers: {callers}")


def _validated(file: Path) -> str:
    """The validator's name and what it checked by."""
    if shutil.which("kubeconform"):
        _run("kubeconform", "-strict", str(file))
        return f"kubeconform {_run('kubeconform', '-v')}"
    ours = Path(sys.executable).with_name("kubernetes-validate")
    said = _run(str(ours) if ours.exists() else "kubernetes-validate", "--strict", str(file))
    version = re.search(r"against version (\S+)", said)
    return f"kubernetes-validate, Kubernetes {version.group(1) if version else '?'}"


def systemd(folder: Path) -> Iterator[str]:
    """The server's unit, alone and with the drop-in for a GPU; the edge's. What they start is not installed here."""
    for what, file, most in (
        ("unit", "cloud-server.service", MOST_EXPOSED),
        ("unit with a GPU", "cloud-server.service", MOST_EXPOSED),
        ("edge's unit", "edge/edge-client.service", MOST_EXPOSED_EDGE),
    ):
        unit = folder / Path(file).name
        text = (DEPLOY / file).read_text(encoding="utf-8")
        unit.write_text(re.sub(r"(?m)^ExecStart=.*", "ExecStart=/bin/true", text), encoding="utf-8")
        if what == "unit with a GPU":
            more = folder / "cloud-server.service.d"
            more.mkdir()
            shutil.copy(DEPLOY / "cloud-server-gpu.conf", more / "gpu.conf")
        if said := _run("systemd-analyze", "verify", "--man=no", str(unit)):
            raise NotContent(said)
        shown = _run("systemd-analyze", "security", "--offline=true", "--no-pager", str(unit))
        exposed = re.search(r"exposure level for \S+: ([\d.]+)", shown)
        if exposed is None or float(exposed.group(1)) > most:
            raise NotContent(f"{what}: exposed {exposed.group(1) if exposed else shown[-200:]}")
        yield f"systemd-analyze verify: {what}; security: {exposed.group(1)} exposed"


def compose(folder: Path) -> Iterator[str]:
    """By each Compose there is."""
    found = 0
    for words in (["docker", "compose"], ["docker-compose"]):
        try:
            version = _run(*words, "version", "--short")
        except NotContent:
            continue
        file = ["-f", str(DEPLOY / "docker-compose.yml")]
        _run(*words, *file, "--profile", "demo", "--profile", "monitoring", "config", "-q")
        _run(*words, *file, "-f", str(DEPLOY / "docker-compose.gpu.yml"), "config", "-q")
        yield f"Compose {version}: docker-compose.yml with its profiles, and with docker-compose.gpu.yml"
        found += 1
    if not found:
        raise NotContent("neither `docker compose` nor `docker-compose` is installed")


def _run(*words: str) -> str:
    """What it said; `NotContent` where it is missing or ends with another status than 0."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        raise NotContent(f"{words[0]} is not installed") from None
    said = (done.stdout + done.stderr).strip()
    if done.returncode:
        raise NotContent(f"{' '.join(words)} ended with status {done.returncode}: {said[-2000:]}")
    return said


def main() -> int:
    """All of them, whatever one of them finds; returns the exit status."""
    status = 0
    for check in (kubernetes, systemd, compose):
        try:
            with tempfile.TemporaryDirectory(prefix="isthmus-manifests-") as folder:
                for line in check(Path(folder)):
                    print(f"ok  {line}", flush=True)
        except NotContent as error:
            print(f"NO  {check.__name__}: {error}", flush=True)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
