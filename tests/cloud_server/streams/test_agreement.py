"""A greeting whose digests differ: the facts behind them decide."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

from cloud_server.core import Core
from shared_hooks import errors
from shared_hooks.modules.manifest import MAX_TEXT, Fact, Manifest, encode
from shared_hooks.modules.tables import tables
from tests.cloud_server.fakes import CoreClient, FakeEngine, hello
from tests.waiting import eventually

EPS: Fact = ("set", "norm", "eps")
GROUPS: Fact = ("usual", "norm", "groups")
SETTINGS = {**FakeEngine().identity.environment, "model_configuration": "another"}


def greeted(facts: Mapping[Fact, str] | bytes, **changes: object) -> CoreClient:
    """A client that has just greeted."""
    with Core([FakeEngine()]) as core:
        client = CoreClient(core, greet=False)
        manifest = facts if isinstance(facts, bytes) else encode(facts)
        client.send(hello(**{"environment": SETTINGS, "manifest": manifest, **changes}))
        eventually(lambda: client.others or client.session._error)
        client.leave()
        return client


def refusal(facts: Mapping[Fact, str] | bytes, **changes: object) -> errors.IsthmusError:
    error = greeted(facts, **changes).session._error
    assert error is not None
    return error


def test_without_facts_the_digests_are_named() -> None:
    assert "setting model_configuration" in str(refusal(b""))


def test_a_fact_that_differs_is_named_in_their_place() -> None:
    text = str(refusal({EPS: "0.001"}))
    assert "norm: eps: client 0.001, server 1e-05" in text and "setting" not in text


def test_harmless_difference_is_accepted_with_a_note() -> None:
    client = greeted({EPS: "1e-05", GROUPS: "1"})
    assert client.session._error is None
    (note,) = client.others[0].welcome.notes
    assert note == "norm: groups: client 1, server has none"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"weights_hash": "w2"}, "weights"),
        ({"structure_digest": "s2"}, "structure"),
        ({"plan_digest": "p2"}, "plan"),
        ({"environment": {**SETTINGS, "model_code": "other"}}, "model_code"),
        ({"environment": {**SETTINGS, "default_dtype": "float64"}}, "default_dtype"),
    ],
)
def test_a_note_excuses_nothing_else(changes: dict[str, object], says: str) -> None:
    error = refusal({EPS: "1e-05", GROUPS: "1"}, **changes)
    assert isinstance(error, errors.Disagreement) and says in str(error)
    assert "model_configuration" not in str(error)


def test_facts_that_are_all_alike_explain_no_digest() -> None:
    assert "model_configuration" in str(refusal({EPS: "1e-05"}))


def test_many_differences_are_reported_in_part() -> None:
    text = str(refusal({("set", f"layer{number}", "eps"): "1" for number in range(1000)}))
    assert len(text) < 6000 and "more" in text


def test_hostile_facts() -> None:
    assert isinstance(refusal(b"junk"), errors.BadFrame)


@pytest.mark.parametrize("data", [zlib.compress(bytes(MAX_TEXT + 1)), b"facts"], ids=["the client", "the server"])
def test_facts_that_are_too_many_leave_the_digests(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    if data == b"facts":

        def refused(self: FakeEngine) -> None:
            raise errors.TooLarge("the model has too many modules")

        monkeypatch.setattr(FakeEngine, "manifest", refused)
    error = refusal(data)
    assert isinstance(error, errors.Disagreement) and "setting model_configuration" in str(error)


def test_facts_are_wanted_where_digests_differ_and_they_did_not_come() -> None:
    def wanted(facts: Mapping[Fact, str] | bytes, **changes: object) -> bool:
        error = refusal(facts, **changes)
        return isinstance(error, errors.Disagreement) and error.wants_facts

    agreeing = dict(FakeEngine().identity.environment)
    assert wanted(b"") and wanted(b"", environment=agreeing, weights_hash="w2")
    assert not wanted({EPS: "0.001"})
    assert not wanted(b"", environment={**agreeing, "default_dtype": "float64"})
    assert not wanted(b"", protocol_version=9)


def test_facts_are_not_read_if_digests_agree() -> None:
    client = greeted(b"junk", environment=dict(FakeEngine().identity.environment))
    assert client.session._error is None


def table(*values: float) -> str:
    model = nn.Module()
    model.register_buffer("freq", torch.tensor(values), persistent=False)
    (reported,) = tables(model).values()
    return reported


class WithTable(FakeEngine):
    def __init__(self) -> None:
        super().__init__()
        self.identity = replace(self.identity, environment={**self.identity.environment, "model_tables": "t1"})

    def manifest(self) -> Manifest:
        return {EPS: "1e-05", ("table", "rope", "freq"): table(1.0, 0.1, 0.01)}


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (table(1.0, 0.1, 0.01 + 1e-9), None),
        (table(1.0, 0.01, 0.0001), "rope: the table freq: client "),
        (None, "rope: the table freq: client has none"),
    ],
)
def test_a_table_that_differs_is_welcome_where_it_does_in_its_last_bits(theirs: str | None, says: str | None) -> None:
    facts: dict[Fact, str] = {EPS: "1e-05"} | ({} if theirs is None else {("table", "rope", "freq"): theirs})
    settings = {**FakeEngine().identity.environment} | ({} if theirs is None else {"model_tables": "t2"})
    with Core([WithTable()]) as core:
        client = CoreClient(core, greet=False)
        client.send(hello(environment=settings))
        eventually(lambda: client.session._error)
        assert isinstance(client.session._error, errors.Disagreement) and client.session._error.wants_facts
        client = CoreClient(core, greet=False)
        client.send(hello(environment=settings, manifest=encode(facts)))
        eventually(lambda: client.others or client.session._error)
        client.leave()
    if says is None:
        assert client.session._error is None
        welcome = client.others[0].welcome
        assert welcome.rounding[0].startswith("rope: the table freq: client ") and not welcome.notes
    else:
        assert says in str(client.session._error)


KERNELS = {**FakeEngine().identity.environment, "attention_kernels": "flash, math"}


def test_which_kernels_may_be_used_differs_between_releases() -> None:
    release = FakeEngine().identity.about["torch"]
    client = greeted(b"", environment=KERNELS, about={"torch": "2.4.1"})
    assert client.session._error is None
    welcome = client.others[0].welcome
    assert "attention_kernels" in welcome.rounding[0] and not welcome.notes, "it may change last bits"
    for about in ({"torch": release}, {"torch": f"{release}+cu130"}, {"torch": f"{release}+cpu"}, {}):
        assert "attention_kernels" in str(refusal(b"", environment=KERNELS, about=about))
    other = {**FakeEngine().identity.environment, "default_dtype": "float64"}
    assert "default_dtype" in str(refusal(b"", environment=other, about={"torch": "2.4.1"}))
