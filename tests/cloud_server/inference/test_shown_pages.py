"""A folder of the operator's under /try: what was there is shown, and nothing else of the machine."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloud_server.config import ServerConfig, read_config
from cloud_server.transport import CloudServer
from cloud_server.transport.rest import pages as shown
from cloud_server.transport.rest.pages import Pages
from shared_hooks.errors import SpecError
from tests.cloud_server.inference.rest import port_of
from tests.cloud_server.inference.served import engine, serving
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret.json").write_text("{}")
    folder = outside / "page"
    (folder / "heads").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html>")
    (folder / "page.js").write_text("1")
    (folder / "heads" / "a b.onnx").write_bytes(b"\0\1")
    (folder / "key.pem").write_text("secret")
    (folder / "link.json").symlink_to(outside / "secret.json")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[CloudServer]:
    with serving(engine(), rest="127.0.0.1:0", pages=folder) as server:
        yield server


def got(server: CloudServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=PATIENCE)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        ("/try/", "text/html; charset=utf-8", b"<!doctype html>"),
        ("/try/index.html", "text/html; charset=utf-8", b"<!doctype html>"),
        ("/try/page.js", "text/javascript; charset=utf-8", b"1"),
        ("/try/heads/a%20b.onnx", "application/octet-stream", b"\0\1"),
    ],
)
def test_dashboard_content(path: str, kind: str, body: bytes, server: CloudServer) -> None:
    status, headers, found = got(server, path)
    assert (status, headers["content-type"], found) == (200, kind, body)
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


def test_page_redirects_to_a_trailing_slash(server: CloudServer) -> None:
    status, headers, _ = got(server, "/try")
    assert (status, headers["location"]) == (308, "/try/")


@pytest.mark.parametrize(
    "path",
    [
        "/try/key.pem",
        "/try/link.json",
        "/try/heads",
        "/try/heads/",
        "/try/../secret.json",
        "/try/%2e%2e/secret.json",
        "/try/..%2fsecret.json",
        "/try/heads/../page.js",
        "/try//etc/passwd",
        "/try/%2fetc%2fpasswd",
        "/try/page.js%00",
        "/try/" + "a" * 5000,
        "/try.html",
    ],
)
def test_nothing_else_is(path: str, server: CloudServer) -> None:
    status, _, body = got(server, path)
    assert status == 404 and b"error" in body and b"secret" not in body.replace(b"secret.json", b"")


def test_page_is_read_by_get_from_the_same_origin_only(server: CloudServer) -> None:
    assert got(server, "/try/page.js", "POST", **{"Content-Length": "0", "Content-Type": "application/json"})[0] == 404
    assert got(server, "/try/page.js", Origin="http://elsewhere.example")[0] == 403


def test_a_file_that_came_later_or_grew_is_not_shown(
    server: CloudServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "later.js").write_text("2")
    assert got(server, "/try/later.js")[0] == 404
    monkeypatch.setattr(shown, "MOST_BYTES", 0)
    assert got(server, "/try/page.js")[0] == 404


def test_without_a_folder_there_is_no_page() -> None:
    with serving(engine(), rest="127.0.0.1:0") as server:
        assert got(server, "/try/")[0] == 404


def test_folders_that_cannot_be_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match=r"no index\.html"):
        Pages(tmp_path)
    (tmp_path / "index.html").write_text("")
    (tmp_path / "more.html").write_text("")
    monkeypatch.setattr(shown, "MOST_FILES", 1)
    with pytest.raises(SpecError, match="more than 1 files"):
        Pages(tmp_path)
    with pytest.raises(SpecError, match="only with --rest-port"):
        ServerConfig(pages=tmp_path)


def test_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('[rest]\nlisten = "127.0.0.1:8000"\npages = "page"\n')
    assert read_config(file).pages == tmp_path / "page"
