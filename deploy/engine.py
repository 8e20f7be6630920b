"""A Docker engine and whichever Compose there is, as `deploy.compose_check` uses them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "deploy" / "docker-compose.yml"
COMMAND_SECONDS, BUILD_SECONDS = 300.0, 3600.0


class EngineFailed(Exception):
    """A command of the engine's failed, or what should have come did not; the message is for the user."""


class ComposeProject:
    """One Compose project. ``environment``: what the file takes from the environment (BASE, PIP_FLAGS, ...)."""

    def __init__(self, compose: str, project: str, environment: Mapping[str, str], profiles: Sequence[str]) -> None:
        self.compose_words = (compose or _compose()).split()
        self.project = project
        self.environment = {**os.environ, **environment}
        self.profiles = tuple(profiles)

    def versions(self) -> str:
        """The engine's and Compose's, in a line."""
        engine = self.docker("version", "--format", "{{.Server.Version}} ({{.Server.Os}}/{{.Server.Arch}})")
        return f"engine {engine}, Compose {self._run([*self.compose_words, 'version', '--short'])}"

    def compose(self, *words: str, timeout: float = COMMAND_SECONDS) -> str:
        """``compose words`` for this project: standard output. `EngineFailed` with the last lines otherwise."""
        return self._run([*self._prefix(), *words], timeout)

    def docker(self, *words: str, timeout: float = COMMAND_SECONDS) -> str:
        return self._run(["docker", *words], timeout)

    def attempt(self, *words: str) -> tuple[int, str]:
        """``docker words``, which may fail: exit status, and all it said."""
        return self._finish(["docker", *words], COMMAND_SECONDS)

    def attempt_compose(self, *words: str) -> tuple[int, str]:
        """``compose words``, which may fail: exit status, and all it said."""
        return self._finish([*self._prefix(), *words], COMMAND_SECONDS)

    def container(self, service: str) -> str:
        """The id of the service's only container, running or ended."""
        wanted = [f"label=com.docker.compose.{key}" for key in (f"project={self.project}", f"service={service}")]
        words = [word for one in wanted for word in ("--filter", one)]
        found = self.docker("ps", "-aq", "--no-trunc", *words).split()
        if len(found) != 1:
            raise EngineFailed(f"{service} has {len(found)} containers, not 1")
        return found[0]

    def inspect(self, thing: str) -> Any:
        """What the engine knows of a container or an image."""
        return json.loads(self.docker("inspect", thing))[0]

    def left(self) -> list[str]:
        """What there still is of the project: containers, networks, volumes."""
        mine = f"label=com.docker.compose.project={self.project}"
        kinds = ("ps", "-aq"), ("network", "ls", "-q"), ("volume", "ls", "-q")
        return [name for words in kinds for name in self.docker(*words, "--filter", mine).split()]

    def down(self) -> None:
        """Everything of the project, whatever state it is in; images stay."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")

    def _prefix(self) -> list[str]:
        profiles = [word for name in self.profiles for word in ("--profile", name)]
        return [*self.compose_words, "-p", self.project, "-f", str(FILE), *profiles]

    def _run(self, words: Sequence[str], timeout: float = COMMAND_SECONDS) -> str:
        status, said = self._finish(words, timeout, together=False)
        return said if status == 0 else self._failed(words, status, said)

    def _failed(self, words: Sequence[str], status: int, said: str) -> str:
        tail = "\n    ".join(said.splitlines()[-25:])
        raise EngineFailed(f"{' '.join(words)} ended with status {status}\n    {tail}")

    def _finish(self, words: Sequence[str], timeout: float, *, together: bool = True) -> tuple[int, str]:
        try:
            done = subprocess.run(
                words, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
            )
        except FileNotFoundError as error:
            raise EngineFailed(f"{words[0]} is not installed") from error
        except subprocess.TimeoutExpired:
            raise EngineFailed(f"{' '.join(words)} did not end within {timeout:.0f} s") from None
        both = done.stdout + done.stderr
        return done.returncode, (both if together or done.returncode else done.stdout).strip()


def until(what: str, seconds: float, ask: Callable[[], Any], every: float = 0.5) -> Any:
    """The first true answer of ``ask``; `EngineFailed` after ``seconds``."""
    limit = time.monotonic() + seconds
    while not (answer := ask()):
        if time.monotonic() > limit:
            raise EngineFailed(f"{what}: not within {seconds:.0f} s")
        time.sleep(every)
    return answer


def _compose() -> str:
    """``docker compose`` where the client has it, else ``docker-compose``."""
    try:
        if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
            return "docker compose"
    except FileNotFoundError:
        raise EngineFailed("docker is not installed") from None
    if shutil.which("docker-compose"):
        return "docker-compose"
    raise EngineFailed("there is no Compose: neither `docker compose` nor `docker-compose`")
