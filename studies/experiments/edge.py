"""The edge of an experiment, in a process of its own: it does what lines of JSON on standard input ask of it.

    python -m studies.experiments.edge MODEL SERVER [CODEC [CALIBRATION MAX_LOSS]]

Each line is {"do": NAME, ...}; each is answered by one line of JSON on standard output. Loading the model is not part
of any experiment: the process is slowed down after its first line, ``{"ready": true}``.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edge_client import EdgeClient
from edge_client.adaptive import AutoClient
from edge_client.adaptive.controller import SplitController
from edge_client.call import Call, Load
from edge_client.model_choice import ModelChoice
from edge_client.planning.link import Curve, Link, as_points
from edge_client.probing import fetch_profile, probe, round_trip
from edge_client.survey import LONGEST_PAUSE
from edge_client.transport import Stamps, now_ns
from edge_client.transport.options import ConnectionOptions
from edge_client.user_text import CLOUD_FILE, CLOUD_ONLY
from shared_hooks.errors import IsthmusError
from shared_hooks.forward.session import run_plain
from shared_hooks.models import InputItem, find_inputs, load_spec
from shared_hooks.profiling import profile as profiles
from shared_hooks.profiling.profiler import ProfileOptions, profile_edge
from shared_hooks.tensors.staging import identical

LEAST_ROUNDS = 3
CRAWLING = Link(Curve.line(1e6, 1e4), Curve.line(0.0, 1e4))
"""On which nothing goes raw: candidates are measured with the codec they name."""


class Edge:
    """One model, one server; a method for each thing that can be asked for."""

    def __init__(
        self, model: str, server: str, codec: str = "raw", calibration: str | None = None, max_loss: str | None = None
    ) -> None:
        self.spec, self.server = load_spec(model), server
        self.client = EdgeClient(
            server,
            ModelChoice(self.spec, device="cpu", threads=1),
            codec=codec,
            calibration=calibration,
            max_loss=max_loss,
            metrics=False,
            deadline=600,
            connection=ConnectionOptions(max_in_flight=1, patience=60),
        )
        self.client.prepare()
        self.codecs = self.client.codecs_chosen_from

    def profile(self, file: str, repetitions: int, seconds: float) -> Any:
        """This side's profile, with ``file`` for the input that is read and preprocessed."""
        example = self.spec.example(self.client.device)
        assert example is not None
        made = profile_edge(
            self.client.wrapped,
            self.spec.model_id,
            *example,
            ProfileOptions(
                repetitions=repetitions,
                seconds=seconds,
                pause=min(LONGEST_PAUSE, round_trip(self.server)),
                codecs=() if self.codecs is None else self.codecs.names,
            ),
            files=[Path(file)],
            prepare=lambda path: self.spec.preprocess(InputItem(path)),
        )
        return profiles.to_json(made)

    def cloud(self, repetitions: int, seconds: float) -> Any:
        """The cloud's profile, as it answers."""
        names = () if self.codecs is None else self.codecs.names
        how = 3, repetitions, seconds, lambda done, total, what: None
        return fetch_profile(self.server, self.spec.model_id, *how, codecs=names)

    def probe(self, sizes: Sequence[int], answer_sizes: Sequence[int], seconds: float) -> Any:
        """What the link carries now."""
        link, load = probe(self.server, sizes=tuple(sizes), answer_sizes=tuple(answer_sizes), seconds=seconds)
        return {"up": link.up.points, "down": link.down.points, "load": asdict(load)}

    def measure(
        self, candidates: Sequence[str], files: Sequence[str], rounds: int, seconds: float, seed: int, warm: bool
    ) -> Any:
        """Every candidate once in every round, in another order each: of each request its candidate, rows, ns, bytes.

        ``warm``: a round before the first does not count. No round begins after ``seconds``, except the first three.
        """
        dice, found, items = random.Random(seed), [], find_inputs(files)
        self.client.codec_link(lambda: CRAWLING)
        for number in range(-1 if warm else 0, rounds):
            if number == 0:
                until = time.monotonic() + seconds
            if number >= LEAST_ROUNDS and time.monotonic() > until:
                break
            order = list(candidates)
            dice.shuffle(order)
            for candidate in order:
                answer = self.request(items[max(number, 0) % len(items)], candidate)
                if number >= 0:
                    found.append([candidate, answer.times.as_dict(), answer.measured_ns, answer.bytes_up])
        return found

    def auto(self, plan: Any, files: Sequence[str], seconds: float) -> Any:
        """Requests one after the other for so long, the cut chosen again for each; ``plan`` as `trace` gathered it.

        Of each request: start, end, what was chosen, what answered it, its error, and whether its output is exact.
        """
        edge, cloud = (profiles.from_json(plan[side], side) for side in ("edge", "cloud"))
        link = Link(Curve(as_points(plan["up"])), Curve(as_points(plan["down"])))
        controller = SplitController(
            edge,
            cloud,
            link,
            Load(**plan["load"]),
            file=edge.files[0],
            file_crosses=plan["file_crosses"],
            codecs=self.codecs,
        )
        items = find_inputs(files)
        expected = [run_plain(self.client.wrapped.model, *self.spec.preprocess(item)) for item in items]
        found: list[Any] = []
        began = time.monotonic()
        with AutoClient(self.client, controller, prepare=self.spec.preprocess) as auto:
            for number in itertools.cycle(range(len(items))):
                start = time.monotonic()
                if start > began + seconds:
                    break
                split, problem, same = "", None, False
                try:
                    answer = auto.infer(items[number])
                    split, same = answer.split, identical(answer.output, expected[number])
                except IsthmusError as error:
                    problem = f"{type(error).__name__}: {error}"
                choice = next(one for one in reversed(auto.decisions.all) if one["kind"] == "choice")
                chosen = " + ".join(filter(None, (choice["candidate"], choice.get("codec"))))
                cut = "input" if choice["candidate"] == CLOUD_ONLY else choice["candidate"]
                answered = chosen if split == cut else split
                found.append([start, time.monotonic(), chosen, answered, problem, same])
            return {"began": began, "requests": found, "decisions": auto.decisions.all}

    def request(self, item: InputItem, candidate: str) -> Any:
        """One request, from the file to the answer; ``candidate``: its key."""
        cut, _, codec = candidate.partition(" + ")
        if codec:
            stamps = Stamps()
            call = Call(*self.spec.preprocess(item))
            stamps.prepared = now_ns()
            requests = self.client.requests
            return requests.finish(requests.begin(call, cut, stamps, self.client.until(None), codec=codec))
        prepare = None if candidate == CLOUD_FILE else self.spec.preprocess
        (answer,) = self.client.infer_many([item], split=candidate, prepare=prepare)
        return answer


def main(*words: str) -> None:
    """See the module."""
    edge = Edge(*words)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        do: Callable[..., Any] = getattr(edge, order.pop("do"))
        print(json.dumps(do(**order)), flush=True)
    edge.client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
