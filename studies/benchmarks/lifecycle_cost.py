"""What a stage of the life cycle costs where nobody listens, and with one hook that does nothing.

CPU time of many calls of `Lifecycle.emit`, less an empty loop's; the facts are those of a real stage. The
last line says what it comes to: the stages of one request on one side, in microseconds.
"""

from __future__ import annotations

from shared_hooks.lifecycle import Event, Lifecycle, Stage, every_n_requests
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import Spread, cpu_ns, timed

LIMIT_US = 1.0
CALLS = 100_000
OF_A_REQUEST = 15
"""On the edge: request, head, bank, encode, send, receive and decode, before and after; and the result. On the cloud
there are as many, with inject and tail for head and bank."""


def measure(options: Options) -> Row:
    silent, heard, rare = Lifecycle(), Lifecycle(), Lifecycle()
    heard.on(Stage.AFTER_BANK)(_nothing)
    rare.on(Stage.AFTER_BANK, when=every_n_requests(100))(_nothing)
    lines, details = [], {}
    for title, lifecycle, limit in (
        ("a stage where nobody listens", silent, LIMIT_US),
        ("... with one hook", heard, None),
        ("... whose condition says no", rare, None),
    ):
        spread = _microseconds(lifecycle, options.repeats(20))
        details[title] = spread.as_dict()
        lines.append(Line(title, spread.median, "us", limit, f"quartiles {spread.low:.3f} to {spread.high:.3f}"))
    lines.append(Line(f"{OF_A_REQUEST} stages of a request, nobody listens", OF_A_REQUEST * lines[0].value, "us"))
    return Row(tuple(lines), details)


def _nothing(event: Event) -> None:
    pass


def _microseconds(lifecycle: Lifecycle, repeats: int) -> Spread:
    early = object()

    def calls() -> None:
        for _ in range(CALLS):
            lifecycle.emit(Stage.AFTER_BANK, split="layer3.0.conv1", early=early)

    def empty() -> None:
        for _ in range(CALLS):
            pass

    return Spread.of([(timed(calls, cpu_ns) - timed(empty, cpu_ns)) / CALLS / 1e3 for _ in range(repeats)])
