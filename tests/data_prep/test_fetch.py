"""Fetching from a server on this machine that misbehaves as servers and lines do. Nothing goes beyond it."""

import ast
import hashlib
import http.server
import importlib.util
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from data_prep import download as download_module
from data_prep import fetch as door
from data_prep.download import Line, digests, download
from data_prep.fetch import FetchConfig, fetch, next_command, wanted
from data_prep.web import Remote, _Redirects, check_address, file_name
from segspeed.config_inference import PredictConfig
from segspeed.types import DataError, SettingError
from segspeed.validate import SettingsError, validate

ROOT = Path(__file__).resolve().parents[2]
DATA = np.random.default_rng(0).bytes(300_000)
OTHER = np.random.default_rng(1).bytes(300_000)
SHA = hashlib.sha256(DATA).hexdigest()


class Server:
    """Serves ``data`` under every path. ``plan`` is a list of what happens to the next requests, by name; then all goes well.

    cut: the connection ends in the middle; 503, 404 ...: that answer; swap: ``data`` becomes ``OTHER`` first;
    long: a length that is too large; stall: nothing comes; redirect: to /there.
    """

    def __init__(self):
        self.data, self.plan, self.log = DATA, [], []
        self.ranges, self.etag, self.modified, self.chunked, self.blind = True, True, False, False, False
        self.slow, self.location, self.headers, self.weak = 0.0, "/there", {}, ""
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                outer.answer(self)

            def log_message(self, *_):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.handle_error = lambda *_: None  # a client that hangs up is what these tests are about
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.base = f"http://127.0.0.1:{self.http.server_port}"

    @property
    def tag(self):
        return f'{self.weak}"{hashlib.md5(self.data).hexdigest()}"'

    def answer(self, h):
        step = self.plan.pop(0) if self.plan else "well"
        self.log.append((h.path, h.headers.get("Range"), step))
        h.close_connection = True
        if step == "swap":
            self.data = OTHER
        if step.isdecimal():
            h.send_response(int(step))
            for key, value in {"Content-Length": "0", **self.headers}.items():
                h.send_header(key, value)
            h.end_headers()
            return
        if step == "redirect":
            h.send_response(302)
            h.send_header("Location", self.location)
            h.send_header("Content-Length", "0")
            h.end_headers()
            return
        asked = re.fullmatch(r"bytes=(\d+)-", h.headers.get("Range") or "")
        start = int(asked[1]) if asked and self.ranges else 0
        condition = h.headers.get("If-Range")
        if start and not self.blind and condition not in (self.tag if self.etag else None, self.date):
            start = 0
        body = self.data[start:]
        h.send_response(206 if start else 200)
        if start:
            h.send_header("Content-Range", f"bytes {start}-{len(self.data) - 1}/{len(self.data)}")
        if self.etag:
            h.send_header("ETag", self.tag)
        if self.modified:
            h.send_header("Last-Modified", self.date)
        if self.chunked:
            h.send_header("Transfer-Encoding", "chunked")
        else:
            h.send_header("Content-Length", str(len(body) + (1000 if step == "long" else 0)))
        h.end_headers()
        if step == "stall":
            time.sleep(1.0)
            return
        if step == "cut":
            body = body[: len(body) // 2]
        for at in range(0, len(body), 30_000):
            piece = body[at : at + 30_000]
            h.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if self.chunked else piece)
            time.sleep(self.slow)
        if self.chunked and step != "cut":
            h.wfile.write(b"0\r\n\r\n")

    @property
    def date(self):
        return "Mon, 01 Jan 2024 00:00:00 GMT" if self.data is DATA else "Tue, 02 Jan 2024 00:00:00 GMT"


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture
def get(server, tmp_path):
    """get(sha256=..., retries=3): download into part; pauses are noted in get.pauses and not waited for."""

    def run(retries=3, timeout=5.0, spare=0.0, tell=lambda text: None, **sums):
        remote = Remote(f"{server.base}/x.bin", "x.bin", **sums)
        run.part = tmp_path / "x.part"
        return download(
            remote, run.part, Line(timeout, retries), spare=spare, sleep=run.pauses.append, tell=tell,
        )  # fmt: skip

    run.pauses = []
    return run


def ranges(server):
    return [entry[1] for entry in server.log]


def test_a_file_comes_with_its_checksums(server, get):
    got = get(sha256=SHA, md5=hashlib.md5(DATA).hexdigest())
    assert get.part.read_bytes() == DATA
    assert (got.size, got.sha256) == (len(DATA), SHA)
    assert got == digests(get.part)
    assert len(server.log) == 1


@pytest.mark.parametrize("chunked", [False, True])
def test_a_cut_connection_is_gone_on_from(chunked, server, get):
    server.plan = ["cut", "cut"]
    server.chunked = chunked
    assert get().sha256 == SHA
    if chunked:  # without a length nothing says what the part is a part of
        assert ranges(server) == [None, None, None]
    else:
        assert ranges(server) == [None, "bytes=150000-", "bytes=225000-"]
    assert [round(p) in expected for p, expected in zip(get.pauses, ((1,), (2, 3)), strict=True)] == [True, True]


def test_a_server_without_ranges_begins_anew(server, get):
    server.plan, server.ranges, told = ["cut"], False, []
    assert get(tell=told.append).sha256 == SHA
    assert any("from the beginning" in text for text in told)


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("etag", [True, False])
def test_a_file_that_changed_is_not_glued(blind, etag, server, get):
    """blind: the server pays no heed to If-Range and sends the rest of the new file."""
    server.plan, server.blind, server.etag, server.modified = ["cut", "swap"], blind, etag, not etag
    assert get().sha256 == hashlib.sha256(OTHER).hexdigest()
    assert get.part.read_bytes() == OTHER


def test_a_file_that_grew_or_shrank_is_not_glued(server, get):
    server.blind, server.etag, server.modified = True, True, False
    server.plan = ["cut"]
    with pytest.raises(DataError):
        get(retries=0)
    server.data = DATA + b"more"
    assert get().size == len(DATA) + 4
    get.part.write_bytes(DATA[:1000])
    server.data = DATA[:500]
    assert get().size == 500


def test_without_etag_and_date_nothing_is_glued(server, get):
    server.etag = False
    server.plan = ["cut"]
    assert get().sha256 == SHA
    assert ranges(server) == [None, None]


def test_a_weak_etag_does_not_vouch_for_bytes(server, get):
    server.weak, server.plan = "W/", ["cut"]
    assert get().sha256 == SHA
    assert ranges(server) == [None, None]
    server.modified, server.plan = True, ["cut"]
    get.part.unlink()
    assert get().sha256 == SHA
    assert ranges(server)[3] == "bytes=150000-", "but the date does"


def test_a_part_of_unknown_origin_is_not_trusted(server, get, tmp_path):
    (tmp_path / "x.part").write_bytes(OTHER[:1000])
    assert get().sha256 == SHA
    (tmp_path / "x.part").write_bytes(OTHER[:1000])
    (tmp_path / "x.part.json").write_text(json.dumps({"url": "http://elsewhere/x", "validator": '"a"', "total": 5000}))
    assert get().sha256 == SHA
    (tmp_path / "x.part").write_bytes(OTHER[:1000])
    (tmp_path / "x.part.json").write_text("{broken")
    assert get().sha256 == SHA
    assert ranges(server) == [None, None, None]


def test_a_second_command_goes_on_where_the_first_gave_up(server, get):
    server.plan = ["cut", "cut", "cut"]
    with pytest.raises(DataError, match=r"ended after 262500 of 300000 bytes.*0\.3 MB stay, the same command goes on"):
        get(retries=2)
    assert get().sha256 == SHA
    assert ranges(server)[-1] == "bytes=262500-"
    assert get().sha256 == SHA, "whole: nothing is asked for"
    assert len(server.log) == 4


def test_a_length_that_is_wrong(server, get):
    server.plan = ["long"] * 20
    with pytest.raises(DataError, match="ended after 300000 of 301000 bytes"):
        get(retries=2)


@pytest.mark.parametrize(
    ("code", "text"),
    [("404", "no such file"), ("410", "no such file"), ("403", "login"), ("401", "login"), ("400", "400")],
)
def test_answers_that_no_second_try_mends(code, text, server, get):
    server.plan = [code]
    with pytest.raises(DataError, match=text):
        get()
    assert len(server.log) == 1


@pytest.mark.parametrize("code", ["500", "502", "503", "504", "429"])
def test_answers_that_pass(code, server, get):
    server.plan = [code, code]
    assert get().sha256 == SHA
    assert len(server.log) == 3


def test_the_server_says_how_long_to_wait(server, get):
    server.plan, server.headers = ["503", "503"], {"Retry-After": "17"}
    get()
    assert get.pauses == [17.0, 17.0]
    server.plan, server.headers = ["503"], {"Retry-After": "99999"}
    get.part.unlink()
    get()
    assert get.pauses[-1] == download_module.LONGEST_PAUSE


def test_the_tries_are_counted_and_end(server, get):
    server.plan = ["503"] * 9
    with pytest.raises(DataError, match=r"503.*4 tries"):
        get(retries=3)
    assert len(server.log) == 4
    assert all(0.7 * 2**n <= p <= 1.3 * 2**n for n, p in enumerate(get.pauses))


def test_progress_makes_the_tries_count_anew(server, get, monkeypatch):
    monkeypatch.setattr(download_module, "GAIN", 1000)
    server.plan = ["cut"] * 6
    assert get(retries=1).sha256 == SHA


def test_a_server_that_falls_silent(server, get):
    server.plan = ["stall"]
    start = time.perf_counter()
    assert get(timeout=0.2).sha256 == SHA
    assert time.perf_counter() - start < 5


def test_a_wrong_checksum_leaves_nothing(server, get):
    with pytest.raises(DataError, match=rf"its sha256 is {SHA}, not 0000.*deleted"):
        get(sha256="0" * 64)
    assert not get.part.exists()
    assert not get.part.with_name("x.part.json").exists()


def test_range_beyond_the_end(server, get, tmp_path):
    server.plan = ["cut"]
    with pytest.raises(DataError):
        get(retries=0)
    server.plan = ["416"]
    assert get().sha256 == SHA
    assert ranges(server) == [None, "bytes=150000-", None]


def test_redirects(server, get):
    server.plan = ["redirect"]
    assert get().sha256 == SHA
    assert [entry[0] for entry in server.log] == ["/x.bin", "/there"]
    get.part.unlink()
    server.plan = ["redirect", "cut", "redirect"]
    assert get().sha256 == SHA
    assert ranges(server)[-1] == "bytes=150000-", "the range goes along"
    for location, text in (
        ("file:///etc/passwd", "not allowed"),
        ("ftp://x/y", "only http"),
        ("http://u:p@x/", "password"),
    ):
        get.part.unlink(missing_ok=True)
        server.plan, server.location = ["redirect"], location
        with pytest.raises(DataError, match=text):
            get()
    server.plan, server.location = ["redirect"] * 50, "/x.bin"
    with pytest.raises(DataError, match="302"):
        get()


@pytest.mark.parametrize("digits", [400, 5000])
def test_lengths_that_no_file_has(digits, server, get):
    server.plan, server.headers = ["200"], {"Content-Length": "9" * digits}
    with pytest.raises(DataError, match=rf"x\.bin: the server says a length of {digits} digits"):
        get()
    server.plan, server.headers = ["cut", "206"], {"Content-Range": f"bytes 150000-{'9' * digits}/{'9' * digits}"}
    assert get().sha256 == SHA, "from the beginning, since the range says nothing"


@pytest.mark.parametrize("size", [b"-5", b"-1f4", b"9" * 5000, b"f" * 400])
def test_chunks_of_a_size_that_is_none(size, get, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            for _ in range(2):
                line, _ = listening.accept()
                with line:
                    line.recv(4096)
                    line.sendall(
                        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + size + b"\r\nhello\r\n0\r\n\r\n"
                    )

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        remote = Remote(f"http://127.0.0.1:{listening.getsockname()[1]}/x.bin", "x.bin")
        with pytest.raises(DataError, match=r"x\.bin: .*\(2 tries\)"):
            download(remote, tmp_path / "part", Line(2.0, 1), sleep=lambda _: None)
        thread.join(5)


def test_a_redirection_that_cannot_be_read(server, get):
    server.plan, server.location = ["redirect"], "http://[::1"
    with pytest.raises(DataError, match=r"leads on to, is none \(Invalid IPv6 URL\)"):
        get()


def test_nobody_there(get, server):
    free = socket.socket()
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    server.base = f"http://127.0.0.1:{port}"
    with pytest.raises(DataError, match=r"no connection to 127\.0\.0\.1 \(.*refused"):
        get(retries=1)
    assert len(get.pauses) == 1


def test_a_name_that_does_not_exist(get, server, monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    server.base = "http://nowhere.invalid"
    with pytest.raises(DataError, match=r"nowhere\.invalid cannot be resolved.*HTTPS_PROXY"):
        get()
    assert get.pauses == [], "at the first try waiting will not mend it"


def test_the_disk_is_looked_at_before_and_named_when_full(get, server, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(download_module.shutil, "disk_usage", lambda _: usage(download_module.RESERVE + 500_000))
    with pytest.raises(DataError, match=r"needs 0\.00 GB more \(with its unpacked files\)"):
        get(spare=1.0)
    assert not get.part.exists()
    real = Path.open

    def full(self, mode="r", *args, **kwargs):
        file = real(self, mode, *args, **kwargs)
        if mode == "ab":
            file.close()
            raise OSError(28, "No space left on device", str(self))
        return file

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(DataError, match="became full"):
        get()


@pytest.mark.parametrize(
    "url", ["ftp://x/y", "file:///etc/passwd", "data:,x", "x.zip", "http://", "http://u:p@x/y", "http://x:99999/y"]
)
def test_addresses_that_are_refused(url):
    with pytest.raises(DataError):
        check_address(url)


def test_file_names():
    assert file_name("https://x/a/b%20c.zip?download=1#top") == "b c.zip"
    for url in ("https://x", "https://x/a/", "https://x/..", "https://x/%2e%2e%2fetc", "https://x/.hidden"):
        with pytest.raises(DataError, match="name="):
            file_name(url)


# The command


def packed(root="Task99_X", bad=None):
    out = io.BytesIO()
    files = {
        "dataset.json": json.dumps({"training": [], "labels": {}}).encode(),
        "imagesTr/a.nii.gz": DATA,
        "imagesTr/._a.nii.gz": b"fork",
    }
    with tarfile.open(fileobj=out, mode="w:gz") as t:
        for name, data in files.items():
            info = tarfile.TarInfo(bad or f"{root}/{name}")
            info.size = len(data)
            t.addfile(info, io.BytesIO(data))
    return out.getvalue()


def config(**given):
    return validate(given, FetchConfig)


@pytest.fixture
def served(server, tmp_path):
    """served(**keys): the command's work on <server>/Task99_X.tar.gz; gives what came."""
    server.data = packed()

    def run(file="Task99_X.tar.gz", **keys):
        cfg = config(url=f"{server.base}/{file}", out=str(tmp_path / "d"), timeout="5s", retries=0, **keys)
        (remote,) = wanted(cfg)
        return fetch(remote, Path(cfg.out), cfg)

    return run


def test_fetched_unpacked_and_not_fetched_again(served, server, tmp_path, capsys):
    folder = served()
    assert folder == tmp_path / "d/Task99_X"
    assert (folder / "imagesTr/a.nii.gz").read_bytes() == DATA
    assert [p.name for p in (folder / "imagesTr").iterdir()] == ["a.nii.gz"]
    assert not (tmp_path / "d/Task99_X.tar.gz").exists()
    assert next_command(folder) == f"python -m data_prep.check data=msd data.root={folder}"
    assert served(sha256=hashlib.sha256(server.data).hexdigest()) == folder
    assert len(server.log) == 1
    assert "is there already (2 files)" in capsys.readouterr().out
    with pytest.raises(DataError, match="unpacked from an archive with sha256"):
        served(sha256="0" * 64)
    (folder / "imagesTr/a.nii.gz").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"1 of 2 files.*imagesTr/a\.nii\.gz.*Move the folder away"):
        served()
    folder.rename(tmp_path / "away")
    assert served() == folder
    assert len(server.log) == 2


def test_an_archive_that_is_kept_is_used_again(served, server, tmp_path):
    folder = served(keep=True)
    archive = tmp_path / "d/Task99_X.tar.gz"
    assert archive.read_bytes() == server.data
    folder.rename(tmp_path / "away")
    assert served(keep=True) == folder
    assert len(server.log) == 1
    archive.write_bytes(b"something else")
    folder.rename(tmp_path / "away2")
    with pytest.raises(DataError, match="nothing says whether it is whole"):
        served()
    assert archive.read_bytes() == b"something else"


def test_an_archive_put_there_by_hand_is_used_and_stays(served, server, tmp_path):
    (tmp_path / "d").mkdir()
    archive = tmp_path / "d/Task99_X.tar.gz"
    archive.write_bytes(server.data)
    with pytest.raises(DataError, match="checksum it should have"):
        served()
    with pytest.raises(DataError, match="it is not overwritten"):
        served(sha256="0" * 64)
    assert served(sha256=hashlib.sha256(server.data).hexdigest()).is_dir()
    assert archive.exists()
    assert server.log == []


@pytest.mark.parametrize("unpacked", [True, False])
def test_another_address_with_the_same_file_name(unpacked, served, server, tmp_path):
    place = served(unpack=unpacked)
    with pytest.raises(DataError, match=r"Task99_X.* it came from http.*name=OTHER.*out="):
        served("other/Task99_X.tar.gz", unpack=unpacked)
    assert len(server.log) == 1
    sha256 = hashlib.sha256(server.data).hexdigest()
    assert served("other/Task99_X.tar.gz", unpack=unpacked, sha256=sha256) == place, "the same bytes, by their checksum"
    assert served("other/Task99_X.tar.gz", unpack=unpacked, name="Other.tar.gz").name.startswith("Other")


def test_a_folder_of_somebody_else_is_left_alone(served, server, tmp_path):
    (tmp_path / "d/Task99_X").mkdir(parents=True)
    with pytest.raises(DataError, match="is there already"):
        served()
    assert server.log == [], "known before anything is fetched"


def test_a_file_that_is_no_archive(served, server, tmp_path):
    server.data = DATA
    assert served("scan.nii.gz", sha256=SHA) == tmp_path / "d/scan.nii.gz"
    assert (tmp_path / "d/scan.nii.gz").read_bytes() == DATA
    served("scan.nii.gz")
    assert len(server.log) == 1
    server.data = b"<html>please log in</html>"
    with pytest.raises(DataError, match=r"no archive \(it is a web page"):
        served("login.zip")
    assert served("page.zip", unpack=False).read_bytes() == server.data


def test_an_evil_archive_unpacks_nothing(served, server, tmp_path):
    server.data = packed(bad="../../evil")
    with pytest.raises(DataError, match="leads out"):
        served()
    assert not list(tmp_path.rglob("*evil*"))
    assert not (tmp_path / "d/Task99_X").exists()


def test_one_command_at_a_time(served, server, tmp_path):
    server.slow = 0.1
    first = threading.Thread(target=served)
    first.start()
    while not server.log:
        time.sleep(0.01)
    with pytest.raises(DataError, match="another command is fetching"):
        served()
    first.join()
    assert (tmp_path / "d/Task99_X").is_dir()


def test_several_and_one_that_fails(server, tmp_path, capsys):
    server.data = DATA
    listed = tmp_path / "list.txt"
    listed.write_text(
        f"# two files\n\n{SHA}  {server.base}/a.bin\n{'0' * 64} {server.base}/b.bin\n{server.base}/c.bin\n"
    )
    assert door.main(config(urls=str(listed), out=str(tmp_path / "d"))) == 1
    out = capsys.readouterr().out
    assert "2 of 3 are there" in out
    assert re.search(r"failed: .*b\.bin: its sha256", out)
    assert {p.name for p in (tmp_path / "d").iterdir()} == {".fetch", "a.bin", "c.bin"}
    assert door.main(config(urls=[f"{server.base}/a.bin", f"{server.base}/c.bin"], out=str(tmp_path / "d"))) == 0
    assert len(server.log) == 3


def test_keys_of_signed_addresses_are_written_nowhere(server, tmp_path, capsys):
    server.data = DATA
    server.plan = ["503", "well", "404"]
    secret = "?Signature=geheim"
    assert door.main(config(url=f"{server.base}/a.bin{secret}", out=str(tmp_path / "d"))) == 0
    with pytest.raises(DataError) as error:
        door.main(config(url=f"{server.base}/b.bin{secret}", out=str(tmp_path / "d")))
    assert "geheim" not in str(error.value)
    assert "geheim" not in capsys.readouterr().out
    assert not any("geheim" in p.read_text() for p in (tmp_path / "d/.fetch").glob("*.json"))


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({}, "give one of"),
        ({"task": "Task04_Hippocampus", "url": "http://x/y"}, "give one of"),
        ({"task": "Task04_Hippocampus", "sha256": "0" * 64}, "belong to url"),
        ({"url": "http://x/y", "sha256": "123"}, "sha256=123"),
        ({"url": "http://x/y", "max_ratio": 0}, "max_ratio"),
    ],
)
def test_wrong_settings(keys, text):
    with pytest.raises(SettingsError, match=text):
        config(**keys)


def test_what_is_wanted(tmp_path):
    (remote,) = wanted(config(task="Task09_Spleen"))
    assert (remote.name, remote.md5) == ("Task09_Spleen.tar", "410d4a301da4e5b2f6f86ec3ddba524e")
    for task in ("Task9_Spleen", "spleen"):
        with pytest.raises(SettingError, match="did you mean Task09_Spleen"):
            wanted(config(task=task))
    with pytest.raises(SettingError, match="there are Task01"):
        wanted(config(task="zzz"))
    with pytest.raises(SettingError, match="would both become"):
        wanted(config(urls=["http://x/a/data.zip", "http://x/b/Data.tar"]))
    assert len(wanted(config(urls=["http://x/a.zip", "http://x/a.tar"], unpack=False))) == 2
    with pytest.raises(SettingError, match="plain file name"):
        wanted(config(url="http://x/y", name="../y"))
    assert wanted(config(url="http://x/Größe.zip"))[0].url == "http://x/Gr%C3%B6%C3%9Fe.zip"
    listed = tmp_path / "l.txt"
    listed.write_text("abc http://x/y\nhttp://x/z\nftp://x/z\n")
    with pytest.raises(DataError, match=r"(?s)line 1: .*line 3: ftp"):
        wanted(config(urls=str(listed)))
    with pytest.raises(DataError, match="cannot be read"):
        wanted(config(urls=str(tmp_path / "none.txt")))


def test_md5_sums_are_those_of_monai():
    """Read from the text: importing it takes ten seconds."""
    source = Path(importlib.util.find_spec("monai").origin).parent / "apps/datasets.py"
    found = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Dict)
    }
    assert found["md5"] == door.TASKS
    assert found["resource"] == {t: f"{door.DECATHLON}{t}.tar" for t in door.TASKS}


def test_https_does_not_lead_on_to_http():
    request = urllib.request.Request("https://x/y?key=geheim")
    with pytest.raises(DataError, match="https://x/y leads on to an address without https"):
        _Redirects().redirect_request(request, None, 302, "", {}, "http://x/y")
    assert _Redirects().redirect_request(request, None, 308, "", {}, "https://z/y").full_url == "https://z/y"


def test_the_next_command(tmp_path):
    assert next_command(tmp_path) is None
    inner = tmp_path / "a b" / "Dataset1"
    inner.mkdir(parents=True)
    (inner / "dataset.json").write_text('{"channel_names": {"0": "CT"}}')
    assert next_command(tmp_path / "a b") == f"python -m data_prep.check data=nnunet 'data.root=\"{inner}\"'"
    (tmp_path / "c").mkdir()
    (tmp_path / "c/dataset_description.json").write_text("{}")
    assert "data=bids" in next_command(tmp_path / "c")


def test_the_keys_stand_in_the_yaml():
    text = (ROOT / "conf/fetch.yaml").read_text()
    assert set(re.findall(r"(?m)^(\w+):", text)) - {"defaults", "hydra"} == set(FetchConfig.model_fields)
    assert set(FetchConfig.model_fields) != set(PredictConfig.model_fields)


def command(*words, **more):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "data_prep.fetch", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **more,
    )  # fmt: skip


def test_ctrl_c_leaves_a_part_that_is_gone_on_from(server, tmp_path):
    server.data, server.slow = packed(), 0.1
    words = (f"url={server.base}/Task99_X.tar.gz", "out=d")
    running = command(*words, cwd=tmp_path)
    part = tmp_path / "d/.fetch/Task99_X.tar.gz.part"
    while not part.exists() or not part.stat().st_size:
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=20)
    assert running.returncode == 130, errors
    assert "same command goes on" in errors
    size = part.stat().st_size
    assert 0 < size < len(server.data)
    server.slow = 0.0
    running = command(*words, cwd=tmp_path)
    out, errors = running.communicate(timeout=20)
    assert running.returncode == 0, errors
    assert ranges(server) == [None, f"bytes={size}-"]
    assert (tmp_path / "d/Task99_X/imagesTr/a.nii.gz").read_bytes() == DATA
    assert "Next: python -m data_prep.check data=msd data.root=d/Task99_X" in out
    assert sorted(p.name for p in (tmp_path / "d/.fetch").iterdir()) == ["Task99_X.tar.gz.json", "Task99_X.tar.gz.lock"]


def test_every_mistake_is_one_text(server, tmp_path):
    server.plan = ["404"]
    running = command(f"url={server.base}/x.zip", cwd=tmp_path)
    _, errors = running.communicate(timeout=20)
    assert (running.returncode, len(errors.splitlines())) == (1, 1)
    assert "no such file" in errors
