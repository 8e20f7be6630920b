"""What the edge shows a server: nothing by accident, and a token in the clear to nobody else's machine."""

from __future__ import annotations

import gc
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from edge_client.commands.arguments import make_parser
from edge_client.commands.common import credentials_of
from edge_client.credentials import Credentials
from edge_client.dial import dial, why_not
from shared_hooks.errors import SpecError
from tests import certificates
from tests.ports import free_port

ELSEWHERE = "192.0.2.1:50051"  # RFC 5737: nobody


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISTHMUS_TOKEN", raising=False)


def test_a_token_goes_in_the_clear_to_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for server in ("127.0.0.1:1", "localhost:1", "[::1]:1"):
        dial(server, credentials=Credentials(token="secret")).close()
    dial(ELSEWHERE).close()
    dial(ELSEWHERE, credentials=Credentials(token="secret", insecure=True)).close()
    dial(ELSEWHERE, credentials=Credentials(token="secret", tls=True)).close()
    for server in (ELSEWHERE, "localhost.example:1", "unix.example:1", "127.0.0.1.example:1"):
        with pytest.raises(SpecError, match="in the clear") as error:
            dial(server, credentials=Credentials(token="secret"))
        assert "secret" not in str(error.value)
    monkeypatch.setenv("ISTHMUS_TOKEN", "secret")
    with pytest.raises(SpecError, match="in the clear"):
        dial(ELSEWHERE)


def test_where_the_token_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_TOKEN", " from-the-environment\n")
    file = tmp_path / "token"
    file.write_text("from-a-file\n")
    assert Credentials().read_token() == "from-the-environment"
    assert Credentials(token_file=file).read_token() == "from-a-file"
    file.write_text("another")
    assert Credentials(token_file=file).read_token() == "another"
    assert Credentials(token="given").read_token() == "given" and "given" not in repr(Credentials(token="given"))
    for text in ("", "two words", "t\u00f6ken", "a\x00b"):
        file.write_text(text)
        with pytest.raises(SpecError, match="one word of ASCII"):
            Credentials(token_file=file).read_token()


def test_contradictory_credentials(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="a certificate needs its key"):
        Credentials(certificate="edge.pem")
    with pytest.raises(SpecError, match="a token and a file of one"):
        Credentials(token="a", token_file="b")
    with pytest.raises(SpecError, match=r"none\.pem: cannot be read"):
        dial("127.0.0.1:1", credentials=Credentials(ca=tmp_path / "none.pem"))


def test_every_command_that_connects_takes_them() -> None:
    words = "--tls --ca ca --cert c --key k --server-name n --token-file t --insecure".split()
    wanted = Credentials(True, "ca", "c", "k", "n", None, "t", True)
    for command in (
        ["run", "--split", "1", "--input", "x"],
        ["watch", "--split", "1", "--input", "x"],
        ["hooks"],
        ["plan"],
        ["profile"],
        ["sweep", "--output", "x"],
    ):
        assert credentials_of(make_parser().parse_args([*command, *words])) == wanted
        assert credentials_of(make_parser().parse_args(command)) == Credentials()


def test_unreachable_server_is_not_reported_as_a_tls_error(tmp_path: Path) -> None:
    assert why_not(f"127.0.0.1:{free_port()}", Credentials(ca=certificates.ca_file(tmp_path))) is None


def test_a_server_that_dies_meanwhile_is_not_for_tls_to_explain_and_leaves_no_socket_open() -> None:
    with resetting() as port:
        for credentials in (Credentials(), Credentials(tls=True)) * 10:
            assert why_not(f"127.0.0.1:{port}", credentials) is None
    gc.collect()  # an open socket is a ResourceWarning, which is an error here


@contextmanager
def resetting() -> Iterator[int]:
    """The port of somebody who ends every connection with a reset, at once."""

    def end_all() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        ending = threading.Thread(target=end_all)
        ending.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            ending.join()
