"""A message names a setting as the one who reads it does: an option of the command, or a keyword of Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import edge_client
from edge_client.__main__ import main
from edge_client.user_text import by_command, either, option
from shared_hooks.errors import IsthmusError

QUIET: Any = {"progress": False}
WRONG: list[tuple[str, Callable[[], object], str, str]] = [
    (
        "plan --uplink 5mbit",
        lambda: edge_client.plan("none", "digits", uplink="5mbit"),
        "--uplink and --rtt",
        "uplink and rtt",
    ),
    (
        "plan --rate 5",
        lambda: edge_client.plan("none", "digits", rate=5),
        "--max-bytes-per-second and --rate",
        "max_bytes_per_second and rate",
    ),
    (
        "plan --uplink x --rtt 1ms",
        lambda: edge_client.plan("none", "digits", uplink="x", rtt="1ms"),
        "--uplink 'x'",
        "uplink 'x'",
    ),
    (
        "plan --partitioner x",
        lambda: edge_client.plan("none", "digits", partitioner="x"),
        "--partitioner x:",
        "partitioner='x':",
    ),
    (
        "plan --max-edge-memory x",
        lambda: edge_client.plan("none", "digits", max_edge_memory="x"),
        "--max-edge-memory 'x'",
        "max_edge_memory 'x'",
    ),
    (
        "profile --side cloud",
        lambda: edge_client.profile("none", "digits", side="cloud"),
        "--side cloud: ",
        "side='cloud': ",
    ),
    (
        "hierarchy --split stem.0",
        lambda: edge_client.hierarchy("digits", split="stem.0"),
        "--split goes together with --head-onnx",
        "split goes together with head_onnx",
    ),
    (
        "hierarchy --validate",
        lambda: edge_client.hierarchy("digits", validate=True),
        "--validate needs a file to check: --onnx",
        "validate needs a file to check: onnx",
    ),
    (
        "sweep --output s --input no.png",
        lambda: edge_client.sweep("none", "digits", "no.png", output="s"),
        "--input: ",
        "inputs: ",
    ),
    (
        "prune --split stem.0 --input x --predictions p",
        lambda: edge_client.prune("digits", "stem.0", "x", predictions="p"),
        "--predictions needs --boxes",
        "predictions needs boxes",
    ),
]


@pytest.mark.parametrize(("words", "call", "commanded", "python"), WRONG, ids=[words for words, *_ in WRONG])
def test_both_are_reported_by_their_own_names(
    words: str, call: Callable[[], object], commanded: str, python: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(IsthmusError) as raised:
        call()
    assert python in str(raised.value) and "--" not in str(raised.value)
    model = [] if "--model" in words else ["--model", "digits"]
    assert main([*words.split(), *model]) != 0
    assert commanded in capsys.readouterr().err
    assert option("rate") == "rate"  # the command has ended


def test_an_option_with_its_value() -> None:
    assert option("min_accuracy", 2) == "min_accuracy=2" and either("a", "b") == "b"
    with by_command():
        assert option("min_accuracy", 2) == "--min-accuracy 2" and either("a", "b") == "a"
