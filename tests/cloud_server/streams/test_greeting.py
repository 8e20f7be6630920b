"""What a greeting may hold before anybody copies, compares or logs it."""

from __future__ import annotations

from typing import Any

import pytest

from cloud_server.core import Core
from cloud_server.limits import Limits
from shared_hooks import errors
from shared_hooks.lifecycle import Event, Stage
from tests.cloud_server.fakes import CoreClient, FakeEngine, header, hello, make_crossing, upload

BAD: dict[str, tuple[dict[str, Any], type[errors.IsthmusError], str]] = {
    "settings": ({"environment": {f"k{n}": "" for n in range(65)}}, errors.TooLarge, "65 settings"),
    "lines about it": ({"about": {f"k{n}": "" for n in range(65)}}, errors.TooLarge, "65 lines"),
    "bytes": ({"about": {"torch": "x" * (64 << 10)}}, errors.TooLarge, "65536 are taken"),
    "a line break in its id": ({"client_id": "a\nb"}, errors.BadFrame, r"client_id .*'a\\nb'"),
    "an escape in its model": ({"model_id": "a\x1b[2J"}, errors.BadFrame, "model_id"),
    "a line break in a digest": ({"weights_hash": "a\u2028b"}, errors.BadFrame, "weights_hash"),
    "a line break in a setting": ({"environment": {"a": "b\nc"}}, errors.BadFrame, "a setting"),
}


@pytest.mark.parametrize(("changes", "kind", "says"), BAD.values(), ids=BAD.keys())
def test_refused_before_hooks_see_it(changes: dict[str, Any], kind: type[errors.IsthmusError], says: str) -> None:
    seen: list[Event] = []
    with Core([FakeEngine()], Limits()) as core:
        core.lifecycle.on(Stage.BEFORE_HANDSHAKE)(seen.append)
        client = CoreClient(core, greet=False)
        client.send(hello(**changes))
        error = client.ended()
        assert type(error) is kind
        with pytest.raises(kind, match=says):
            raise error
        assert "\n" not in str(error) and not seen


def test_lines_about_a_client_begin_none_in_a_log() -> None:
    with Core([FakeEngine()], Limits()) as core:
        client = CoreClient(core, greet=False)
        client.send(hello(weights_hash="w2", about={"torch": "2\nCRITICAL all is lost"}))
        assert "torch 2 CRITICAL all is lost" in str(client.ended()) and "\n" not in str(client.ended())


def test_names_that_are_not_known_are_quoted() -> None:
    with Core([FakeEngine()], Limits()) as core:
        client, crossing = CoreClient(core), make_crossing(1)
        client.send(header(1, crossing, cut_digest="a\nb"), header(2, crossing, hooks=["a\nb"]))
        client.send(upload(crossing), header(3, crossing, hooks=[""] * 65))
        for id, says in ((1, r"no cut 'a\nb'"), (2, r'observer "a\nb"'), (3, "65 observers")):
            failed = client.answer(id).failed
            assert failed is not None and says in failed.message
