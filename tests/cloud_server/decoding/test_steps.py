"""Decoding sessions through frames: what a step does, what is refused by name, and that a refusal changes nothing."""

from __future__ import annotations

import itertools
from typing import Any

import psutil
import pytest
import torch

from cloud_server import Core, Limits
from cloud_server.access import Caller
from protos.isthmus.v1 import split_pb2
from tests.cloud_server.decoding.served import answered, close, frame, join, ones, rows, send_large, serving
from tests.cloud_server.decoding.tail import CUT, Gate
from tests.cloud_server.fakes import CoreClient, acknowledge
from tests.cloud_server.small import failure
from tests.waiting import PATIENCE, eventually


def step(client: CoreClient, id: int, session: int, number: int, asked: dict[str, Any] | None = None) -> None:
    client.send(frame(id, session, number, asked, [ones()]))


class TestSteps:
    def test_state_stays_from_one_to_the_next(self, client: CoreClient, core: Core) -> None:
        for number in range(5):
            step(client, number + 1, 7, number)
            assert rows(client, number + 1) == (number + 1, 4.0 * (number + 1))
        assert (len(core.decoding), core.decoding.nbytes, core.decoding.steps) == (1, 5 * 8, 5)

    def test_a_payload_in_its_header_or_in_chunks_is_the_same(self, client: CoreClient) -> None:
        send_large(client, 1, 7, 0, ones(50_000))
        client.send(frame(2, 7, 1, {}, [ones(30_000)]))
        assert rows(client, 1) == (1, 50_000.0) and rows(client, 2) == (2, 80_000.0)

    def test_a_copy_continues_apart(self, client: CoreClient) -> None:
        step(client, 1, 7, 0)
        client.send(frame(2, 8, 0, {}, [ones(2)], fork=(7, 1)), frame(3, 9, 0, {}, [], fork=(7, 1)))
        assert rows(client, 2) == (2, 6.0) and rows(client, 3) == (1, 4.0)
        step(client, 4, 7, 1)
        step(client, 5, 9, 1)
        step(client, 6, 8, 1)
        assert [rows(client, id) for id in (4, 5, 6)] == [(2, 8.0), (2, 8.0), (3, 10.0)]

    def test_closed(self, client: CoreClient, core: Core) -> None:
        step(client, 1, 7, 0)
        rows(client, 1)
        client.send(close(2, 7), close(3, 7), close(4, 12345))
        assert all(client.answer(id).reply is not None for id in (2, 3, 4))
        assert (len(core.decoding), core.decoding.nbytes) == (0, 0)
        step(client, 5, 7, 1)
        assert failure(client, 5)[0] == "SessionLost" and "was closed" in failure(client, 5)[1]
        step(client, 6, 7, 0)  # it may be opened again
        assert rows(client, 6) == (1, 4.0)

    def test_step_resent_after_a_reconnect_is_computed_once(self, client: CoreClient, core: Core) -> None:
        step(client, 1, 7, 0)
        step(client, 2, 7, 1)
        rows(client, 2)
        client.leave()
        again = join(core)
        step(again, 2, 7, 1)
        step(again, 3, 7, 2)
        assert rows(again, 2) == (2, 8.0) and rows(again, 3) == (3, 12.0)

    def test_step_that_outlives_its_stream_is_fetched_on_the_next(self, client: CoreClient, core: Core) -> None:
        step(client, 1, 7, 0, {"wait": True})
        assert Gate.entered.wait(PATIENCE)
        client.leave()
        again = join(core)
        step(again, 1, 7, 0, {"wait": True})
        Gate.opened.set()
        assert rows(again, 1) == (1, 4.0)


class TestRefused:
    """Each leaves the session as it was."""

    @pytest.fixture(autouse=True)
    def opened(self, client: CoreClient) -> None:
        step(client, 1, 7, 0)
        rows(client, 1)
        step(client, 2, 7, 1)
        rows(client, 2)

    def intact(self, client: CoreClient, id: int = 99) -> None:
        step(client, id, 7, 2)
        assert rows(client, id) == (3, 12.0)

    @pytest.mark.parametrize("number", [0, 1, 3, 2**63, 2**64 - 1])
    def test_out_of_order(self, client: CoreClient, number: int) -> None:
        step(client, 3, 7, number)
        name, message = failure(client, 3)
        assert name == "StepOutOfOrder" and str(number) in message and "next is 2" in message
        self.intact(client)

    @pytest.mark.parametrize("workers", [2])
    def test_two_at_once(self, client: CoreClient) -> None:
        step(client, 3, 7, 2, {"wait": True})
        assert Gate.entered.wait(PATIENCE)
        step(client, 4, 7, 2)
        client.send(frame(5, 8, 0, {}, [], fork=(7, 2)))
        for id in (4, 5):
            name, message = failure(client, id)
            assert name == "StepOutOfOrder" and "not over" in message
        Gate.opened.set()
        assert rows(client, 3) == (3, 12.0)

    @pytest.mark.parametrize(
        ("changes", "error", "word"),
        [
            ({"cut": "first"}, "Disagreement", '"second"'),
            ({"number": 0, "fork": (7, 2)}, "BadFrame", "itself"),
            ({"session": 8, "number": 0, "fork": (2**64 - 1, 2)}, "SessionLost", str(2**64 - 1)),
            ({"session": 8, "number": 0, "fork": (7, 2**64 - 1)}, "StepOutOfOrder", "it has done 2"),
            ({"session": 8, "number": 5, "fork": (7, 2)}, "BadFrame", "only step 0"),
            ({"session": 8, "number": 2}, "SessionLost", "never opened"),
            ({"session": 8, "number": 0, "cut": "nowhere"}, "UnknownLayer", "nowhere"),
            ({"session": 8, "number": 0, "cut": "x" * 5000}, "BadFrame", "5000"),
            ({"session": 0}, "BadFrame", "from 1"),
            ({"asked": [1, 2]}, "BadFrame", "list"),
            ({"asked": "text"}, "BadFrame", "str"),
            ({"asked": {"fail": "refuse"}}, "InputMismatch", "as it was asked"),
            ({"asked": {"fail": "raise"}}, "ModelFailed", "ValueError"),
            ({"header": b"garbage"}, "BadFrame", "checksum"),
            ({"header": b""}, "BadFrame", "header"),
            ({"payload_bytes": 128}, "BadFrame", "128"),
            ({"payload": bytes(65)}, "BadFrame", "65 came with the header"),
            ({"payload": bytes(64)}, "BadFrame", "checksum"),
            ({"cut_digest": "abc"}, "BadFrame", "names its cut"),
            ({"file": split_pb2.FileInput(suffix=".png")}, "BadFrame", "nor a file"),
            ({"decoding": None}, "BadFrame", "must be 0"),
            ({"decoding": split_pb2.Decoding(cut=CUT, close=True)}, "BadFrame", "closed"),
        ],
    )
    def test_hostile_frames(self, client: CoreClient, changes: dict[str, Any], error: str, word: str) -> None:
        values: dict[str, Any] = {"session": 7, "number": 2, "tensors": [ones()], **changes}
        client.send(frame(3, **values))
        name, message = failure(client, 3)
        assert name == error and word in message, message
        self.intact(client)

    def test_a_header_of_many_lists_or_bytes(self, client: CoreClient) -> None:
        client.send(frame(3, 7, 2, {"x": [[]] * 40_000}), frame(4, 7, 2, {"x": "y" * (1 << 20)}))
        assert failure(client, 3)[0] == failure(client, 4)[0] == "TooLarge"
        self.intact(client)

    def test_session_is_private_to_its_client(self, client: CoreClient, core: Core) -> None:
        others = [join(core, "mallory"), join(core, "alice", caller=Caller("test", "somebody else"))]
        for other in others:
            step(other, 1, 7, 2)
            other.send(frame(2, 8, 0, {}, [], fork=(7, 2)), close(3, 7))
            assert failure(other, 1)[0] == failure(other, 2)[0] == "SessionLost"
            assert other.answer(3).reply is not None
            step(other, 4, 7, 0)  # its own, of the same number
            assert rows(other, 4) == (1, 4.0)
        self.intact(client)

    def test_a_step_that_ends_in_an_unknown_place_ends_its_session(self, client: CoreClient, core: Core) -> None:
        step(client, 3, 7, 2, {"fail": "exit"})
        step(client, 4, 8, 0)
        step(client, 5, 7, 2)
        assert failure(client, 3)[0] == "ModelFailed" and rows(client, 4) == (1, 4.0)
        name, message = failure(client, 5)
        assert name == "SessionLost" and "SystemExit" in message
        assert len(core.decoding) == 1

    def test_a_step_that_takes_too_long(self) -> None:
        with serving(Limits(max_compute_seconds=0.2)) as core:
            client = join(core)
            step(client, 1, 7, 0)
            step(client, 2, 7, 1, {"spin": True})
            assert rows(client, 1) == (1, 4.0)
            name, message = failure(client, 2)
            assert name == "TooLarge" and "max_compute_seconds" in message
            step(client, 3, 7, 1)
            assert failure(client, 3)[0] == "SessionLost" and "Overtime" in failure(client, 3)[1]

    def test_a_model_that_changed_under_it(self, client: CoreClient) -> None:
        """What was computed with other weights, in any session, is not to be continued."""
        step(client, 3, 8, 0)
        step(client, 4, 8, 1, {"spoil": True})
        rows(client, 3)
        assert failure(client, 4)[0] == "SessionLost"
        step(client, 5, 7, 2)  # another session's
        for id in (4, 5):
            name, message = failure(client, id)
            assert name == "SessionLost" and "loaded again" in message
        step(client, 6, 7, 0)
        assert rows(client, 6) == (1, 4.0)

    def test_first_steps_that_fail_leave_nothing(self, client: CoreClient, core: Core) -> None:
        step(client, 3, 8, 0, {"fail": "refuse"})
        client.send(frame(4, 9, 0, {"fail": "raise"}, [], fork=(7, 2)))
        assert failure(client, 3)[0] == "InputMismatch" and failure(client, 4)[0] == "ModelFailed"
        eventually(lambda: len(core.decoding) == 1)
        self.intact(client)


def test_a_step_that_needs_more_comes_again(client: CoreClient) -> None:
    """It was not made: neither is the next one due, nor is a copy opened twice."""
    step(client, 1, 7, 0, {"need": True})
    step(client, 2, 7, 0)
    step(client, 3, 7, 1, {"need": True})
    step(client, 4, 7, 1)
    assert rows(client, 2) == (1, 4.0) and rows(client, 4) == (2, 8.0)
    client.send(frame(5, 8, 0, {"need": True}, [], fork=(7, 2)), frame(6, 8, 0, {}, [], fork=(7, 2)))
    assert rows(client, 6) == (2, 8.0)


def test_answers_do_not_change_with_later_steps(client: CoreClient) -> None:
    client.send(frame(1, 7, 0, {"echo": True}, [torch.arange(4.0)]))
    step(client, 2, 7, 1)
    assert rows(client, 1) == (1, 6.0) and rows(client, 2) == (2, 10.0)


def test_nothing_is_left_of_a_thousand_sessions(client: CoreClient, core: Core) -> None:
    """Neither in the books nor in memory: what is remembered of one that is over is a line."""
    process, ids, before = psutil.Process(), itertools.count(1), 0
    for session in range(1, 1001):
        for one in (frame(next(ids), session, 0, {}, [ones(2048)]), frame(next(ids), session, 1, {}, [ones(2048)])):
            client.send(one)
            client.answer(one.request.id)
        client.send(close(end := next(ids), session))
        client.answer(end)
        client.send(acknowledge(*client.results))
        client.results.clear()
        if session == 200:
            before = process.memory_info().rss
    assert (len(core.decoding), core.decoding.nbytes, core.decoding.steps) == (0, 0, 2000)
    assert process.memory_info().rss - before < 4 << 20


class TestAhead:
    """Steps that come while those before them are under way."""

    @pytest.fixture(autouse=True)
    def opened(self, client: CoreClient) -> None:
        step(client, 1, 7, 0)
        rows(client, 1)

    @pytest.mark.parametrize("workers", [1, 3])
    def test_steps_ahead_are_computed_in_order(self, client: CoreClient) -> None:
        step(client, 2, 7, 1, {"wait": True})
        assert Gate.entered.wait(PATIENCE)
        for number in (4, 3, 2):
            step(client, 10 + number, 7, number)
        Gate.opened.set()
        for id, number in ((2, 1), (12, 2), (13, 3), (14, 4)):
            assert rows(client, id) == (number + 1, 4.0 * (number + 1))

    @pytest.mark.parametrize("workers", [1, 3])
    def test_steps_behind_a_failed_one_are_refused(self, client: CoreClient) -> None:
        step(client, 2, 7, 1, {"wait": True, "fail": "refuse"})
        assert Gate.entered.wait(PATIENCE)
        step(client, 3, 7, 2)
        step(client, 4, 7, 3)
        Gate.opened.set()
        assert failure(client, 2)[0] == "InputMismatch"
        assert failure(client, 3)[0] == failure(client, 4)[0] == "StepOutOfOrder"
        step(client, 5, 7, 1)
        assert rows(client, 5) == (2, 8.0)

    def test_steps_of_an_ended_session_are_refused(self, client: CoreClient) -> None:
        step(client, 2, 7, 1, {"wait": True})
        assert Gate.entered.wait(PATIENCE)
        step(client, 3, 7, 2)
        client.send(close(4, 7))
        Gate.opened.set()
        assert failure(client, 3)[0] == "SessionLost"

    def test_step_too_far_ahead_is_refused_at_once(self, client: CoreClient) -> None:
        step(client, 2, 7, 1, {"wait": True})
        assert Gate.entered.wait(PATIENCE)
        step(client, 3, 7, 1000)
        Gate.opened.set()
        assert failure(client, 3)[0] == "StepOutOfOrder"

    def test_cancelled_steps_are_removed(self, client: CoreClient, core: Core) -> None:
        step(client, 2, 7, 1, {"wait": True})
        assert Gate.entered.wait(PATIENCE)
        step(client, 3, 7, 2)
        step(client, 4, 7, 3)
        client.send(split_pb2.ClientFrame(cancel=split_pb2.Cancel(id=3)))
        assert failure(client, 3)[0] == "Cancelled"
        Gate.opened.set()
        assert rows(client, 2) == (2, 8.0)
        assert failure(client, 4)[0] == "StepOutOfOrder"  # it does not wait for itself
        step(client, 5, 7, 2)
        assert rows(client, 5) == (3, 12.0)
        eventually(lambda: not any(one.early for one in core.decoding._sessions.values()))

    def test_cancelled_step_fails_those_behind_it(self, client: CoreClient) -> None:
        step(client, 2, 9, 0, {"wait": True})  # has the only worker
        assert Gate.entered.wait(PATIENCE)
        step(client, 3, 7, 1)
        step(client, 4, 7, 2)
        client.send(split_pb2.ClientFrame(cancel=split_pb2.Cancel(id=3)))
        assert failure(client, 3)[0] == "Cancelled"
        Gate.opened.set()
        assert failure(client, 4)[0] == "StepOutOfOrder"

    @pytest.mark.parametrize("workers", [1, 3])
    def test_a_new_branch_begins_where_steps_are_taken_back(self, client: CoreClient) -> None:
        step(client, 2, 7, 1)
        rows(client, 2)
        step(client, 3, 7, 2, {"wait": True})
        assert Gate.entered.wait(PATIENCE)
        step(client, 4, 7, 3)
        client.send(frame(5, 7, 2, {}, [ones()], branch=1))  # waits for the one that is computed
        client.send(frame(6, 7, 3, {}, [ones()], branch=1))
        Gate.opened.set()
        for id in (5, 6):
            assert answered(client, id)[0]["rows"] >= 3
        step(client, 7, 7, 4)  # of the old branch
        assert failure(client, 7)[0] == "StepOutOfOrder" and "taken back" in failure(client, 7)[1]
        client.send(frame(8, 7, 9, {}, [ones()], branch=2))
        assert failure(client, 8)[0] == "StepOutOfOrder"
        client.send(frame(9, 7, 4, {}, [ones()], branch=1))
        answered(client, 9)
