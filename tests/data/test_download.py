"""Against a real HTTP server on this machine that breaks connections."""

import hashlib
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from longtail.data import cifar
from longtail.data.cifar import LAYOUTS, download_cifar, fetch
from longtail.errors import UserError
from longtail.files.progress import Display

CONTENT = np.random.default_rng(0).bytes(3_000_000)
MD5 = hashlib.md5(CONTENT).hexdigest()
QUIET = Display(quiet=True)


class Server(ThreadingHTTPServer):
    """Sends `content`, at most `cut` bytes a connection; `ranges` switches resuming off."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.cut, self.ranges, self.requests = CONTENT, len(CONTENT), True, []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.requests.append(wanted)
        if "missing" in self.path:
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.server.ranges else 0
        if start >= len(self.server.content):
            self.send_error(416)
            return
        body = self.server.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.cut])

    def log_message(self, *words) -> None:
        pass


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_broken_transfer_goes_on_where_it_stopped(server, tmp_path):
    server.cut = 1_300_000
    fetch(server.url, tmp_path / "file.bin", MD5, QUIET, pause=0)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.requests == [None, "bytes=1300000-", "bytes=2600000-"]
    assert [path.name for path in tmp_path.iterdir()] == ["file.bin"]


def test_a_later_call_goes_on_too(server, tmp_path):
    server.cut = 400_000
    with pytest.raises(UserError, match="broke with .*; run the same command again"):
        fetch(server.url, tmp_path / "file.bin", MD5, QUIET, pause=0)
    assert (tmp_path / "file.bin.part").stat().st_size == 2_000_000
    server.cut = len(CONTENT)
    fetch(server.url, tmp_path / "file.bin", MD5, QUIET, pause=0)
    assert server.requests[-1] == "bytes=2000000-"
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_link_in_place_of_the_partial_file_is_not_written_through(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "file.bin.part").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=r"file.bin.part is a link"):
        fetch("http://127.0.0.1:9/file.bin", tmp_path / "file.bin", MD5, QUIET)
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_server_that_cannot_resume_sends_everything(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(b"something else")
    server.ranges = False
    fetch(server.url, tmp_path / "file.bin", MD5, QUIET, pause=0)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_wrong_sum_is_refused_and_nothing_kept(server, tmp_path):
    with pytest.raises(UserError, match="MD5 sum differs"):
        fetch(server.url, tmp_path / "file.bin", "0" * 32, QUIET, pause=0)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_fetched_and_what_is_missing_is_said(server, tmp_path):
    (tmp_path / "file.bin").write_bytes(CONTENT)
    fetch(server.url, tmp_path / "file.bin", MD5, QUIET)
    assert server.requests == []
    with pytest.raises(UserError, match="404"):
        fetch(server.url.replace("file", "missing"), tmp_path / "other.bin", MD5, QUIET, pause=0)
    with pytest.raises(UserError, match="knows cifar10 and cifar100, not 'digits'"):
        download_cifar("digits", str(tmp_path), QUIET)


def test_a_data_set_arrives_whole(server, tmp_path, monkeypatch):
    """Its folder is recognised by the names of its files; tests/data/test_cifar.py reads real ones."""
    packed, folder = tmp_path / "c.tar.gz", tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    layout = LAYOUTS["cifar10"][0]
    for name in (*layout.train, layout.test, layout.names):
        (folder / name).write_bytes(CONTENT[:1000])
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(folder, folder.name)
    server.content = packed.read_bytes()
    server.cut = len(server.content) // 2 + 1
    archive = (server.url, hashlib.md5(server.content).hexdigest())
    monkeypatch.setitem(cifar.ARCHIVES, "cifar10", archive)
    folder = download_cifar("cifar10", str(tmp_path / "data"), QUIET)
    assert folder == tmp_path / "data" / "cifar-10-batches-py"
    assert len(server.requests) == 2
    download_cifar("cifar10", str(tmp_path / "data"), QUIET)
    assert len(server.requests) == 2
