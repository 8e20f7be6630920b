"""Define the tasks' options: a dataclass for each, whose fields are its keyword arguments and its command's options.

`edge_client.plan(..., rtt="30ms")` and ``edge-client plan --rtt 30ms`` are the same field. Fields without a help text
are keyword arguments only: on a command line several options, or the command itself, replace them. Loads no torch:
``--help`` imports it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from shared_hooks.errors import near
from shared_hooks.options import (
    comma_separated,
    fraction,
    non_negative_int,
    non_negative_seconds,
    option,
    positive_int,
    positive_number,
    positive_numbers,
    positive_seconds,
)

if TYPE_CHECKING:
    from pathlib import Path

    from edge_client.credentials import Credentials
    from edge_client.planning.codecs import LossTable
    from edge_client.planning.leakage import LeakageTable
    from edge_client.planning.partitioners import Partitioner

LOSSLESS = ("raw", "lz4", "zstd", "shuffle-lz4", "shuffle-zstd", "sparse")
LOSSY = ("bf16", "fp16", "int8", "int6", "int5", "int4", "int3", "int2", "int1", "basis", "frames")
CODECS = (*LOSSLESS, *LOSSY)
"""As in `shared_hooks.codecs`, which loads torch."""
KINDS = ("classes", "embedding", "boxes", "tensors")
"""Kinds of a model's output."""
BOOLEAN = argparse.BooleanOptionalAction
OBJECTIVE = "NAME|NAME=WEIGHT,..."


def _silent(text: str) -> None:
    """The default of `Reporting.say`."""


def codec_option(auto: str = "") -> Any:
    """Declare ``--codec``. ``auto``: what the word does, where it is allowed."""
    known = (*CODECS, "auto") if auto else CODECS

    def codec(text: str) -> str:
        if all(":" in one or one in known for one in (text.split(",") if auto else (text,))):
            return text  # a chain has one for each crossing
        listed = f"{', '.join(known)}, learned:FILE, noise:SIGMA"
        raise argparse.ArgumentTypeError(f'"{text}" is not one of {listed}.{near(text, known)}')

    chosen = f"; auto {auto}" if auto else ""
    text = (
        f"for the frontier: without loss {', '.join(LOSSLESS)}; with a loss {', '.join(LOSSY)}, learned:FILE (of "
        f"edge-client learn), noise:SIGMA; a plugin's{chosen}"
    )
    return option("raw", "CODEC", text, parse=codec)


def observers_option(default: tuple[str, ...] = (), text: str = "observe both sides") -> Any:
    """Declare ``--observe``."""
    help = (
        f'{text}: "activation" for statistics, "debug" for NaN and Inf, and such; another word lists them; the server '
        f"must allow them (default: {','.join(default) or 'none'})"
    )
    return option(default, "NAME,NAME", help, words=("--observe",), parse=comma_separated)


# What several tasks take.


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """How to report meanwhile: ``progress`` on standard error; ``say`` receives lines for people."""

    progress: bool = True
    say: Callable[[str], None] = _silent


@dataclass(frozen=True, kw_only=True)
class Connecting(Reporting):
    """Credentials for a server that requires them."""

    credentials: Credentials | None = None


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The codec of what is sent."""

    codec: str = codec_option("chooses by speed, size and link")
    calibration: str | Path | LossTable | None = option(
        None, "FILE", "of edge-client calibrate, for --codec auto, basis, frames"
    )
    max_loss: str | float | None = option(None, "SHARE", "that --codec auto may lose, such as 0.5%% (default: nothing)")


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The objective of the best cut, and its constraints. ``power``: watts of this machine, active and idle."""

    objective: str = option("latency", OBJECTIVE)
    max_edge_memory: str | float | None = option(None, "SIZE", "such as 64MiB: limit on the edge, weights included")
    max_bytes_per_second: str | float | None = option(None, "SIZE", "such as 500kB: limit for both ways, at --rate")
    rate: float | None = option(None, "N", "requests per second", parse=positive_number)
    min_accuracy: float | None = option(None, "X", "agreement with the whole model, 0 to 1", parse=float)
    max_leakage: float | None = option(None, "X", "of what crosses, 0 to 1; needs --leakage", parse=float)
    leakage: str | Path | LeakageTable | None = option(None, "FILE", "leakage.json of edge-client leakage")
    power: tuple[float, float] | None = None
    edge_profile: str | Path | None = option(None, "FILE", "made by edge-client profile (default: measured now)")
    cloud_profile: str | Path | None = option(None, "FILE", "made by edge-client profile (default: measured now)")
    partitioner: str | Partitioner = option("objective", "NAME", "what decides")
    partitioner_option: str | None = option(None, "TEXT", "passed to the partitioner")


@dataclass(frozen=True, kw_only=True)
class OtherLink:
    """A link given by its numbers instead of measured."""

    uplink: str | None = option(None, "RATE", "such as 5mbit: do not probe the link; needs --rtt")
    downlink: str | None = option(None, "RATE", "(default: same as --uplink)")
    rtt: str | None = option(None, "TIME", "such as 30ms")


# One for each task, in the order of the docs.


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Encoded, OtherLink, Goal, Connecting):
    """Options of `edge_client.plan`, which explains them."""

    edge_speed: float = option(
        1.0, "X", "plan for a device with X times the speed of the one measured, such as 0.2", parse=float
    )
    correct: bool | None = option(
        None,
        help="correct the plan by a few real requests (default: where link and edge are measured)",
        action=BOOLEAN,
    )
    repetitions: int = option(10, "N", "for each profile", parse=positive_int)
    seconds: float = option(20.0, "S", "for each profile", parse=positive_seconds)
    engine: str | Sequence[str] = option("torch", "NAME,NAME", "of heads: torch, onnxruntime, compile, aotinductor")


@dataclass(frozen=True, kw_only=True)
class PlanGenerationOptions(OtherLink, Connecting):
    """Options of `edge_client.plan_generation`, which explains them. ``goal`` is the argument of ``--generate``."""

    prompt_tokens: int = option(128, "N", parse=positive_int)
    new_tokens: int = option(128, "N", parse=positive_int)
    draft: int = option(
        0, "K", "tokens guessed before each round trip; needs --acceptance (default: none)", parse=positive_int
    )
    acceptance: float | None = option(None, "X", "the share of them that is right, 0 to 1", parse=float)
    top_logits: int | None = option(None, "K", "only the K likeliest come back (default: all)", parse=positive_int)
    goal: str = "token"
    objective: str = option("latency", OBJECTIVE)
    max_edge_memory: str | float | None = option(None, "SIZE", "such as 64MiB: limit on the edge, weights included")
    measured: str | Path | None = option(None, "FILE", "the JSON of an earlier plan --generate, to measure nothing")
    power: tuple[float, float] | None = None
    seconds: float = option(20.0, "S", "for measuring", parse=positive_seconds)


@dataclass(frozen=True, kw_only=True)
class PlanChainOptions(Connecting):
    """Options of `edge_client.plan_chain`, which explains them."""

    seconds: float = option(20.0, "S", "for each profile", parse=positive_seconds)
    correct: bool = option(True, help="correct the plan by a few real requests", action=BOOLEAN)


@dataclass(frozen=True, kw_only=True)
class ProfilingOptions(Connecting):
    """Options of `edge_client.profile`, which explains them."""

    side: Literal["edge", "cloud", "both"] | None = option(
        None, help="(default: both with --server, else edge)", choices=("edge", "cloud", "both")
    )
    warmup: int = option(3, "N", "forwards before it", parse=positive_int)
    repetitions: int = option(20, "N", "at most N", parse=positive_int)
    seconds: float = option(20.0, "S", "for each side", parse=positive_seconds)
    codec: str = codec_option("measures each")
    calibration: str | Path | LossTable | None = option(None, "FILE", "of edge-client calibrate: its books for basis")
    failures: Literal["raise", "return"] = "raise"


@dataclass(frozen=True, kw_only=True)
class SweepOptions(Connecting):
    """Options of `edge_client.sweep`, which explains them."""

    output: str | Path = option(metavar="DIR", help="folder for the results; run again to resume")
    cuts: str | Sequence[str | int] | None = option(
        None,
        "NAME,NAME",
        "these (default: block ends, and layers where other bytes cross)",
        exclusive="cuts",
    )
    every: int | None = option(None, "N", "every n-th allowed cut; 1 for all", exclusive="cuts", parse=positive_int)
    repetitions: int = option(3, "N", "for every request", parse=positive_int)
    layer_repetitions: int = option(
        1, "N", "in N of them each way runs once more, with its layers measured", parse=positive_int
    )
    warmup: int = option(1, "N", "requests before, not counted", parse=positive_int)
    local: bool = option(True, help="do not run the cuts in this process")
    predict: bool = option(True, help="no profiles and no plan first")
    profile_repetitions: int = option(10, "N", "for the plan", parse=positive_int)
    profile_seconds: float = option(20.0, "S", "for each side", parse=positive_seconds)
    correct: bool = option(False, help="same as plan: correct the plan by a few real requests")
    objective: str = option("latency", OBJECTIVE)
    codec: str = codec_option()
    seconds: float | None = option(None, "S", "stop measuring after this long; resumable", parse=positive_seconds)
    deadline: float = option(60.0, "S", "for each request", parse=positive_seconds)
    patience: float = option(15.0, "S", "wait for a server", parse=positive_seconds)
    observers: Sequence[str] = observers_option(text="one more request for each input, observed on both sides")
    engine: str | Sequence[str] = option("torch", "NAME,NAME", "of heads: torch, onnxruntime")
    leakage: str | Path | LeakageTable | None = option(
        None, "FILE", "of edge-client leakage: drawn against latency in the report"
    )
    fresh: bool = option(False, help="start over in a folder that holds a sweep")
    failures: Literal["raise", "return"] = "raise"


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """Options of `edge_client.prune`, which explains them."""

    choose_by: Any = option(None, "FOLDER", "to choose by (default: every other file of --input)")
    keep: str | int | Sequence[int] | None = option(
        None,
        "N,N",
        "channels kept (default: a quarter, half, 3 quarters)",
        words=("--keep", "--keeps"),
    )
    scores: str | Sequence[str] | None = option(None, "NAME,NAME", "scorings to try (default: all)")
    seeds: int = option(5, "N", "for the random control", parse=positive_int)
    boxes: str | Path | None = option(None, "FILE", "JSON: score only inside the calibration files' objects")
    predictions: str | Path | None = option(None, "FILE", "JSON: score only in predictions that match --boxes")
    structural: bool = option(False, help="also cut the channels out of the model")
    output: str | Path | None = option(None, "DIR", "masks, smaller models and report.html go here")
    batch: int = option(16, "N", "inputs in one forward", parse=positive_int)
    requests: int = option(20, "N", "through a server", parse=positive_int)
    serve: bool | None = option(
        None, help="do not measure bytes and times", words=("--no-serve",), action="store_false"
    )
    progress: bool = True


@dataclass(frozen=True, kw_only=True)
class LeakageOptions(Reporting):
    """Options of `edge_client.leakage`, which explains them."""

    splits: str = option("all", "CUT,CUT|all", 'cuts, "input" too')
    every: int | None = option(None, "N", "with all: every n-th cut", parse=positive_int)
    codecs: str | Sequence[str] = option(
        "raw", "NAME,NAME", "as they leave what crosses", words=("--codecs", "--codec")
    )
    public: Any = option(None, "FOLDER", "other inputs, which the attacker learns from")
    labels: str | Path | None = option(None, "FILE.csv", "a file's name and what is to stay private of it")
    decoder: str = option("small", choices=("small", "large"))
    seeds: int = option(3, "N", "repetitions", parse=positive_int)
    steps: int | None = option(None, "N", "of an attacker's training (default: 500)", parse=positive_int)
    output: str | Path | None = option(None, "DIR", "leakage.json, report.html; the same command continues")
    fresh: bool = option(False, help="attack all of it again")


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(Reporting):
    """Options of `edge_client.calibrate`, which explains them."""

    labels: str | Path | None = option(None, "FILE.csv", "rows of a file's name and its label")
    max_loss: str | float = option(0.01, "SHARE", "to be allowed, such as 0.5%% (default: 1%%)")
    codecs: str | Sequence[str] | None = option(None, "NAME,NAME", "these codecs (default: all)")
    cuts: str | None = option(
        None, "NAME,NAME", 'these cuts, "input" among them (default: all allowed)', exclusive="cuts"
    )
    every: int | None = option(None, "N", "every n-th allowed cut", exclusive="cuts", parse=positive_int)
    kind: str | None = option(None, help="of the output (default: by the spec, names and shapes)", choices=KINDS)
    seconds: float | None = option(None, "S", "begin no input after this long", parse=positive_seconds)
    learn: int | None = option(None, "N", 'of the inputs, for "basis" to learn from (default: a quarter)', parse=int)
    output: str | Path | None = option(
        None, "DIR", "calibration.json and report.html, as they grow; the same command continues"
    )
    fresh: bool = option(False, help="measure all of it again")


@dataclass(frozen=True, kw_only=True)
class LearnOptions(Reporting):
    """Options of `edge_client.learn`, which explains them."""

    output: str | Path = option(metavar="DIR", help="codec.safetensors; the same command continues")
    rate: str | int | None = option(None, "BYTES", "least loss, payload of at most BYTES on average", exclusive="goal")
    max_loss: str | float | None = option(
        None, "SHARE", "the fewest bytes within this loss (default: 0.5%%)", exclusive="goal"
    )
    choose_by: Any = option(None, "FOLDER", "other inputs, to choose among encoders by")
    labels: str | Path | None = option(None, "FILE.csv", "rows of a file's name and its label, for the table alone")
    kind: str | None = option(None, help="of the output (default: by the spec, names and shapes)", choices=KINDS)
    epochs: int | None = option(None, "N", "for each encoder (default: by the inputs)", parse=positive_int)
    seconds: float | None = option(None, "S", "end training after this long", parse=positive_seconds)
    seed: int = option(0, "N", "of the split and the training", parse=int)
    fresh: bool = option(False, help="train all of it again")


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of `edge_client.export`, which explains them."""

    split: str | Sequence[str] = option(
        metavar="CUT,CUT|all", help="the cuts at which heads end", parse=comma_separated
    )
    output: str | Path = option(metavar="DIR", help="folder for the heads and their manifest")
    check: bool = option(False, help="compare once more, by the files as a device reads them")
    whole: bool = option(False, help="the whole model, too, for when the server is gone")
    vary: str = option("both", "WHAT", "what a head takes any of: batch, length, both, fixed")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of an open load, of `edge_client.bench` and `edge_client.bench_heads`, which explain them."""

    rate: float | Sequence[float] | None = option(
        None, "N,N", "requests a second of all clients, one or several (default: 10)", parse=positive_numbers
    )
    arrivals: str = option("poisson", "poisson|constant|FILE", "FILE: a time a line")
    seconds: float | None = option(None, "S", "of each rate (default: 10, or all of FILE)", parse=positive_seconds)
    warmup: float = option(2.0, "S", "of each rate, before, not counted", parse=non_negative_seconds)
    clients: int = option(4, "N", "each with a stream", parse=positive_int)
    split: str = option("input", "CUT=WEIGHT,...", "cuts, by weight: stage2=0.7,stage3=0.3")
    codec: str = option("raw", "CODEC=WEIGHT,...", "a client has one; shares of clients")
    deadline: float = option(1.0, "S", "within which an answer is goodput", parse=positive_seconds)
    give_up: float = option(10.0, "S", "on a request", parse=positive_seconds)
    patience: float = option(5.0, "S", "wait for a server", parse=positive_seconds)
    in_flight: int = option(4, "N", "of each client", parse=positive_int)
    seed: int = option(0, "N", "of what is drawn", parse=non_negative_int)


@dataclass(frozen=True, kw_only=True)
class BenchOptions(LoadOptions, Connecting):
    """Options of `edge_client.bench`, which explains them."""

    exact: bool = option(
        True,
        help="--no-exact: the server may compute requests of several clients in batches",
        action=BOOLEAN,
    )
    recorded: bool = option(False, help="run the heads once, and send their frontiers again and again")
    processes: int = option(1, "N", "that send", parse=positive_int)


@dataclass(frozen=True, kw_only=True)
class LightBenchOptions(LoadOptions, Connecting):
    """Options of `edge_client.bench_heads`, which explains them."""

    split: str = ""
    provider: str = "cpu"
    threads: int | None = 1


@dataclass(frozen=True, kw_only=True)
class HierarchyOptions:
    """Options of `edge_client.hierarchy`, which explains them."""

    graphml: str | Path | None = option(None, "FILE", "modules, calls and operations as a graph")
    onnx: str | Path | None = option(None, "FILE", "export, every node tagged; FILE.json lists the tags")
    validate: bool = option(False, help="read the ONNX files again, run them, compare with torch")
    split: str | int | None = option(None, "LAYER_ID|NAME", "a cut, for --head-onnx and --tail-onnx")
    head_onnx: str | Path | None = option(None, "FILE", "write the head, up to the cut, to this file")
    tail_onnx: str | Path | None = option(None, "FILE", "write the tail, after the cut, to this file")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Options of `edge_client.verify`, which explains them."""

    cuts: str | Sequence[str] | None = option(
        None, "NAME,NAME", 'these (default: all); "a + b" is a cut along branches'
    )
    credentials: Credentials | None = None
    progress: bool = True


# Options of commands that are not tasks.


@dataclass(frozen=True, kw_only=True)
class AutoSplit(Goal):
    """Options of ``--split auto``; in Python `edge_client.AutoOptions`."""

    profile_seconds: float = option(5.0, "S", "for each profile", parse=positive_seconds)
    log_decisions: str | None = option(None, "FILE", "write every decision and its numbers as lines of JSON")


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Observers of a run's models."""

    observers: Sequence[str] = observers_option()


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Options of ``edge-client watch``."""

    observers: Sequence[str] = observers_option(("activation", "debug"))


@dataclass(frozen=True, kw_only=True)
class WaitOptions:
    """Timeouts of a command."""

    deadline: float = option(60.0, "S", "for each request", parse=positive_seconds)
    patience: float = option(15.0, "S", "wait for a server", parse=positive_seconds)


@dataclass(frozen=True, kw_only=True)
class RunOptions(Encoded, WaitOptions):
    """Options of ``edge-client run`` for an `edge_client.EdgeClient` and its requests."""

    in_flight: int = option(1, "N", "requests under way, for throughput", parse=positive_int)
    warmup: int = option(0, "N", "requests of the first input before all, not counted", parse=non_negative_int)
    witness: float = option(
        0.0,
        "P",
        "also compute this share of the split inputs whole on the edge, and compare: 0 to 1",
        parse=fraction,
    )
    fallback: str | None = option(
        None, help="answer on the edge what the server does not: gone, other weights, refused", choices=("edge",)
    )
    exact: bool = option(
        True,
        help="--no-exact: the server may compute inputs in batches with other clients'; last bits then differ",
        action=BOOLEAN,
    )
