"""A token of a split `generate()` over loopback against one of the whole model in this process.

The whole model runs its head and its tail one after the other, so it is what the two halves take without anything
between them. Beside it the same halves are called by hand in two processes, with a bare gRPC echo between them: the
least that Python's gRPC takes there. Both sides have the same number of threads. Times are wall-clock, between one
word's logits and the next; the first word is the time to the first token. The ways take turns.
"""

from __future__ import annotations

import itertools
import statistics
import time
from functools import partial
from typing import Any

import torch

from edge_client import EdgeClient
from edge_client.generation import SplitGenerator
from edge_client.model_choice import ModelChoice
from studies.benchmarks import language
from studies.benchmarks.frontier import HEADER_BYTES, REPLY_BYTES, EchoClient
from studies.benchmarks.processes import cloud, echo
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.stream import through
from studies.benchmarks.timing import Spread, ratio, timed, wall_ns

LANGUAGE = "studies.benchmarks.language"
PROMPT, WORDS = 64, 32
LARGE, SMALL, WIDE = "language_16x768", "language_8x256", "language_wide"
CUTS = {LARGE: "model.layers.7", SMALL: "model.layers.3", WIDE: "model.layers.0"}
RATIO, MILLISECONDS, FIRST, BYTES = 1.05, 1.0, 1.1, 8.6
LINKS = (20, 40)
"""Round trips of links (ms) that a relay makes."""


def measure(options: Options) -> Row:
    lines: list[Line] = []
    details: dict[str, Any] = {}
    with cloud(*CUTS, shape=None, module=LANGUAGE, threads=options.threads) as address:
        for name in (LARGE, SMALL):
            whole, split, records = _measured(address, name, options)
            details[name] = {"whole": whole, "split": split}
            lines += _lines(name, whole, split, records)
            lines.append(_echoed(name, options))
            lines += [_far(address, name, milliseconds, split, options) for milliseconds in LINKS]
        lines.append(_bytes(address, options))
    return Row(tuple(lines), details)


def _choice(name: str, options: Options) -> ModelChoice:
    return ModelChoice(f"{name}={LANGUAGE}:{name}", device="cpu", threads=options.threads)


def _prompt() -> dict[str, torch.Tensor]:
    ids = torch.randint(6, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Clock:
    """A logits processor that notes when each word's logits are there."""

    def __init__(self) -> None:
        self.marks: list[int] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.marks.append(time.perf_counter_ns())
        return scores


def _run(generate: Any) -> tuple[Any, list[int]]:
    """The words, and nanoseconds of the first and of every later one."""
    from transformers import LogitsProcessorList

    clock = Clock()
    began = time.perf_counter_ns()
    words = generate(**_prompt(), max_new_tokens=WORDS, do_sample=False, logits_processor=LogitsProcessorList([clock]))
    marks = [began, *clock.marks]
    return words, [later - earlier for earlier, later in itertools.pairwise(marks)]


def _measured(address: str, name: str, options: Options) -> tuple[Any, Any, Any]:
    """Times of the whole model and of the split one: the first words', and all later ones'."""
    whole: dict[str, list[int]] = {"first": [], "later": []}
    split: dict[str, list[int]] = {"first": [], "later": []}
    with EdgeClient(address, _choice(name, options)) as client:
        generator = SplitGenerator(client, CUTS[name])
        for turn in range(1 + options.repeats(12)):
            with torch.no_grad():
                words, here = _run(client.wrapped.model.generate)
            found, there = _run(generator.generate)
            if not torch.equal(words, found):
                raise RuntimeError(f"{name}: the split model writes other words")
            if turn:
                for times, kept in ((here, whole), (there, split)):
                    kept["first"].append(times[0])
                    kept["later"] += times[1:]
        return whole, split, generator.records


def _lines(name: str, whole: Any, split: Any, records: Any) -> list[Line]:
    later = {side: Spread.of(times["later"]).scaled(1e-6) for side, times in (("whole", whole), ("split", split))}
    more = later["split"].median - later["whole"].median
    low = later["split"].low - later["whole"].low
    parts = {
        "head": statistics.median(one.head_ns for one in records[2:]),
        "wait": statistics.median(one.wait_ns for one in records[2:]),
        "server": statistics.median(one.server["compute"] for one in records[2:]),
    }
    note = (
        f"{later['split'].median:.2f} ms against {later['whole'].median:.2f} ms, lower quartiles {low:.2f} ms apart; "
        f"head {parts['head'] / 1e6:.2f}, tail at the server {parts['server'] / 1e6:.2f}, all between them "
        f"{(parts['wait'] - parts['server']) / 1e6:.2f} ms"
    )
    first = ratio(split["first"], whole["first"])
    times = f"{statistics.median(split['first']) / 1e6:.0f} ms against {statistics.median(whole['first']) / 1e6:.0f} ms"
    if name == LARGE:
        value = ratio(split["later"], whole["later"])
        found = [Line(f"{name}: a token / whole model", value, "x", RATIO, note)]
    else:
        found = [Line(f"{name}: more a token than the whole model", more, "ms", MILLISECONDS, note)]
    return [*found, Line(f"{name}: first token, prompt of {PROMPT} / whole model", first, "x", FIRST, times)]


def _echoed(name: str, options: Options) -> Line:
    """The same halves called by hand, with a bare echo of as many bytes between them."""
    first, tokens = int(CUTS[name].rpartition(".")[2]) + 1, PROMPT + WORDS
    model: Any = getattr(language, name)()
    here = language.Blocks(model, 0, model.config.num_hidden_layers)
    head = language.Blocks(model, 0, first)
    hidden = model.model.embed_tokens(torch.zeros(1, 1, dtype=torch.int64)).detach()
    message = bytes(HEADER_BYTES + 4 * model.config.hidden_size)
    answer = str(REPLY_BYTES + 4 * language.WORDS)
    times: dict[str, list[int]] = {"whole": [], "echo": []}

    def whole(position: int) -> None:
        model.lm_head(model.model.norm(here.step(hidden, position)))

    with (
        echo("--decoder", name, str(first), str(tokens), "1", answer) as address,
        EchoClient(address, 1) as bare,
        torch.no_grad(),
    ):

        def echoed(position: int) -> None:
            head.step(hidden, position)
            bare.send([message])

        for turn in range(1 + options.repeats(12)):
            for step, kept in ((whole, times["whole"]), (echoed, times["echo"])):
                marks = [timed(partial(step, position), wall_ns) for position in range(tokens)]
                kept += marks[PROMPT:] if turn else []
    found = {way: Spread.of(one).scaled(1e-6) for way, one in times.items()}
    note = f"{found['echo'].median:.2f} ms against {found['whole'].median:.2f} ms"
    what = f"{name}: ... its halves by hand, a bare echo between them"
    if name == LARGE:
        return Line(what, ratio(times["echo"], times["whole"]), "x", None, note)
    return Line(what, found["echo"].median - found["whole"].median, "ms", None, note)


def _far(address: str, name: str, milliseconds: int, near: dict[str, list[int]], options: Options) -> Line:
    """Return what a link adds to a token. ``near``: times over loopback."""
    with through(address, (milliseconds / 2e3, 0.0)) as far:
        _, split, _ = _measured(far, name, options)
    there, here = (statistics.median(times["later"]) / 1e6 for times in (split, near))
    note = f"{there:.2f} ms against {here:.2f} ms over loopback"
    return Line(f"{name}: ... more over a link of {milliseconds} ms", there - here, "ms", None, note)


def _bytes(address: str, options: Options) -> Line:
    with EdgeClient(address, _choice(WIDE, options)) as client:
        generator = SplitGenerator(client, CUTS[WIDE])
        generator.generate(**_prompt(), max_new_tokens=8, do_sample=False)
        up, down = generator.records[-1].bytes_up, generator.records[-1].bytes_down
    note = f"{up} bytes, of which 8192 are the hidden state of width 4096 in bfloat16; down {down} (1,000 words)"
    return Line("bytes up a token", up / 1e3, "kB", BYTES, note)
