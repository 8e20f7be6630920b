"""What is over holds no memory: uploads that expired, requests given up in the line, refusals that are kept."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest
import torch

from protos.isthmus.v1 import split_pb2
from shared_hooks.crossing import generators
from shared_hooks.errors import BadFrame, IsthmusError
from studies.attacks.bulk import Target
from studies.attacks.corpus import KEEPER, Recording, corpus, record
from studies.attacks.flatness import Flatness
from studies.attacks.shots import Shot
from studies.attacks.volleys import Gunner, Volley
from tests.starts import run


@pytest.fixture(scope="module")
def recording() -> Recording:
    return [*record(KEEPER, 1)][-1]


@pytest.fixture
def target() -> Iterator[Target]:
    made = Target((KEEPER,))
    yield made
    made.core.close()


def announced(target: Target, recording: Recording, count: int, *, whole: bool, first: int = 1) -> None:
    """Uploads of which the last byte has not come, or all has; nobody computes them."""
    upload, *_ = Shot.of(recording).frames(0)
    session = target.session(KEEPER)
    session.receive(upload)
    for id in range(first, first + count):
        for frame in Shot.of(recording).asking(id, upload.cut.digest):
            if frame.WhichOneof("frame") == "chunk" and not whole:
                frame.chunk.data = frame.chunk.data[:-1]
            session.receive(target.parsed(frame))


def test_an_upload_that_expired_holds_no_memory(target: Target, recording: Recording) -> None:
    session = target.session(KEEPER)
    for turn in range(4):
        announced(target, recording, 24, whole=False, first=1 + 100 * turn)
        requests = list(session._uploads._receiving.values())  # type: ignore[union-attr]
        for request in requests:
            request.deadline_ms, request.began_ns = 1, 0
        target.core.requests.sweep()
        assert not any(request.payload.nbytes or request.header for request in requests)
        assert target.core.requests.held_bytes == 0
    assert len(requests) <= 2 * target.core.limits.max_in_flight, "they pile up"


def test_waiter_that_times_out_leaves_the_queue(target: Target, recording: Recording) -> None:
    announced(target, recording, 8, whole=True)
    assert len(target.tasks) == 8
    for id in range(1, 9):
        target.session(KEEPER).receive(split_pb2.ClientFrame(cancel=split_pb2.Cancel(id=id)))
    assert not target.tasks and target.core.requests.held_bytes == 0


def test_headers_count_as_memory(target: Target, recording: Recording) -> None:
    announced(target, recording, 1, whole=False)
    (request,) = target.session(KEEPER)._uploads._receiving.values()  # type: ignore[union-attr]
    assert target.core.requests.held_bytes == len(recording.payload) + len(request.header) > len(recording.payload)


def test_a_refusal_that_is_kept_holds_on_to_nothing(target: Target, recording: Recording) -> None:
    shot = Shot.of(recording)
    shot.reported = {**shot.reported, "path": "another"}
    volley = Volley("", KEEPER)
    volley.add(shot.frames(5), own=True)
    assert target.fire(volley)[0] == ["Disagreement"]
    kept = [one.found for one in target.engines[0]._wrapped.recipes._kept.values()]
    errors = [found for found in kept if isinstance(found, IsthmusError)]
    assert len(errors) == 1 and errors[0].__traceback__ is None and errors[0].__cause__ is None


def test_more_acknowledged_than_are_kept(target: Target) -> None:
    volley = Volley("", KEEPER)
    volley.add([split_pb2.ClientFrame(acknowledge=split_pb2.Acknowledge(ids=range(5000)))], own=True)
    assert target.fire(volley)[0] == ["stream ended: BadFrame"]


@pytest.mark.parametrize("name", generators.ALL)
def test_a_state_of_zeros_is_none(name: str) -> None:
    zeros = {
        "torch": b"".join((torch.get_rng_state().numpy().tobytes()[:24], bytes(5056 - 24))),
        "numpy": b"[[" + b", ".join([b"0"] * 624) + b"], 624, 0, 0.0]",
        "python": b"[3, [" + b", ".join([b"0"] * 624) + b", 624], null]",
    }[name]
    with generators.kept(generators.ALL), pytest.raises(BadFrame, match="random number generator"):
        generators.restore((name,), (torch.frombuffer(bytearray(zeros), dtype=torch.uint8),))


def test_a_volley_is_made_of_seed_and_number_alone() -> None:
    gunner = Gunner(corpus(), 7)
    wanted = [gunner.volley(number) for number in range(12)]
    assert any(volley.jumbled for volley in wanted)
    code = """if True:
        from studies.attacks.corpus import corpus
        from studies.attacks.volleys import Gunner
        gunner = Gunner(corpus(), 7)
        print(*(gunner.volley(number).digest for number in reversed(range(12))))
    """
    reported = run([sys.executable, "-c", code])
    assert reported.returncode == 0, reported.stderr
    assert reported.stdout.split()[::-1] == [volley.digest for volley in wanted]


def test_memory_that_grows_is_reported() -> None:
    assert Flatness.of([[n * 1000, 300 + (n > 3) * 9] for n in range(101)]).flat is True
    assert Flatness.of([[n * 1000, 300 + n / 2] for n in range(101)]).flat is False
    assert Flatness.of([[n * 100, 300 + n / 2] for n in range(101)]).flat is None


def test_a_recipe_lets_go_of_the_request(target: Target, recording: Recording) -> None:
    assert target.honest(recording, 9) == ""
    session = target.session(KEEPER, honest=True)
    gone = weakref.ref(session)
    session.disconnect()
    del session, target.sessions[KEEPER, True]
    gc.collect()
    assert gone() is None
