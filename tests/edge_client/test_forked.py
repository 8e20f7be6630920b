"""A process that is forked from a client's refuses to be one, by name: gRPC would hang there and disturb its parent."""

from __future__ import annotations

import sys

import pytest

from tests.edge_client.test_processes import CloudProcess
from tests.starts import ROOT, run

PROGRAM = """
import os
import sys
import warnings

import torch

from edge_client import EdgeClient
from edge_client.model_choice import ModelChoice
from shared_hooks.errors import SpecError

warnings.simplefilter("ignore")  # Python 3.12 warns of forks with threads
address, x = sys.argv[1], torch.zeros(1, 1, 16, 16)


def made():
    return EdgeClient(address, ModelChoice("digits", device="cpu", threads=1), "pool")


def refused(use):
    try:
        use()
    except SpecError as error:
        return "was forked" in str(error)
    return False


def in_child(check):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if check() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def answered():
    with made() as client:
        return torch.equal(client.infer(x).output, before)


with made() as client:
    before = client.infer(x).output

    def refuses():
        right = refused(lambda: client.infer(x)) and refused(lambda: made().open())
        client.close()
        return right

    print(in_child(refuses), torch.equal(client.infer(x).output, before))
print(in_child(answered), answered())  # its client is closed
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_forked_process_is_no_client_and_its_parent_remains_one() -> None:
    server = CloudProcess("--model", "digits")
    try:
        done = run([sys.executable, "-c", PROGRAM, server.address], cwd=ROOT, timeout=120)
    finally:
        server.end()
    assert done.stdout.split() == ["0", "True", "0", "True"], done.stderr
