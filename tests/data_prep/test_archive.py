import gzip
import io
import os
import stat
import tarfile
import zipfile

import numpy as np
import pytest

from data_prep import archive, archive_formats
from data_prep.archive import unpack
from data_prep.archive_formats import kind, stem
from segspeed.types import DataError

FILES = {"T/dataset.json": b"{}", "T/imagesTr/a.nii.gz": b"image" * 1000, "T/labelsTr/a.nii.gz": b"label"}


def entry(name, data=b"", **more):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def link(name, target):
    return entry(name, type=tarfile.SYMTYPE, linkname=target)


def hard(name, target):
    return entry(name, type=tarfile.LNKTYPE, linkname=target)


@pytest.fixture
def tar(tmp_path):
    """tar(*entries, name="x.tar"): an archive with exactly these entries."""

    def make(*entries, name="x.tar", form=tarfile.PAX_FORMAT):
        path = tmp_path / name
        with tarfile.open(path, "w:gz" if name.endswith("gz") else "w", format=form) as t:
            for info, data in entries:
                t.addfile(info, io.BytesIO(data))
        return path

    return make


@pytest.fixture
def zipped(tmp_path):
    def make(*entries, name="x.zip", method=zipfile.ZIP_DEFLATED):
        path = tmp_path / name
        with zipfile.ZipFile(path, "w", method) as z:
            for info, data in entries:
                z.writestr(info, data)
        return path

    return make


@pytest.fixture
def open_up(tmp_path):
    """open_up(path): unpack, and look that nothing but the target changed, whatever happens."""

    def run(path, **more):
        before = set(tmp_path.rglob("*"))
        target = tmp_path / "out" / "T"
        try:
            return unpack(path, target, tmp_path / "work", **more)
        finally:
            made = set(tmp_path.rglob("*")) - before
            assert all(p in (target, target.parent) or target in p.parents for p in made), made
            assert not (tmp_path / "work").exists()

    return run


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.tgz", "x.zip"])
def test_what_was_packed_comes_out(name, tar, zipped, open_up, tmp_path):
    path = zipped(*FILES.items()) if name == "x.zip" else tar(*(entry(n, d) for n, d in FILES.items()), name=name)
    found = open_up(path)
    assert found == {n.removeprefix("T/"): len(d) for n, d in FILES.items()}
    for n, d in FILES.items():
        assert (tmp_path / "out" / n).read_bytes() == d
    assert stem(name) == "x"


def test_names_of_archives():
    assert [stem(n) for n in ("a.b.TAR.GZ", "a.nii.gz", ".zip", "a.zip", "a")] == ["a.b", None, None, "a", None]


def test_without_a_common_folder_nothing_is_left_out(tar, open_up, tmp_path):
    open_up(tar(entry("a/x", b"1"), entry("./b.txt", b"2"), entry("c", type=tarfile.DIRTYPE)))
    assert sorted(p.name for p in (tmp_path / "out/T").iterdir()) == ["a", "b.txt", "c"]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_foreign_names_of_every_format(form, tar, open_up):
    name = "T/" + "d" * 90 + "/Größe 1/" + "f" * 60
    assert list(open_up(tar(entry(name, b"x"), form=form))) == [name[2:]]


def test_modes_owners_and_devices_bits_are_not_taken_over(tar, open_up, tmp_path):
    open_up(tar(entry("T/a", b"x", mode=0o6777, uid=0)))
    mode = (tmp_path / "out/T/a").stat().st_mode
    assert not mode & (stat.S_ISUID | stat.S_ISGID | stat.S_IXUSR)


def test_resource_forks_of_macos_stay_out(zipped, open_up):
    found = open_up(zipped(("T/a.nii", b"1"), ("T/._a.nii", b"2"), ("__MACOSX/T/._a.nii", b"3"), ("T/.DS_Store", b"4")))
    assert found == {"a.nii": 1}


def test_a_zip_made_on_windows(zipped, open_up):
    info = zipfile.ZipInfo("T\\sub\\a.nii")
    info.filename = "T\\sub\\a.nii"  # the constructor turns the strokes on Windows only
    assert list(open_up(zipped((info, b"1"), ("T/b.nii", b"2")))) == ["sub/a.nii", "b.nii"]


NAMES = ("../evil", "T/../../evil", "/tmp/evil", "T/..", "C:/evil", "c:evil", "T\\..\\evil", "..\\evil")


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_out_are_refused(name, tar, zipped, open_up):
    with pytest.raises(DataError, match="leads out of its folder"):
        open_up(tar(entry("T/good", b"x"), entry(name, b"x")))
    info = zipfile.ZipInfo("x")
    info.filename = name
    with pytest.raises(DataError, match="leads out of its folder"):
        open_up(zipped(("T/good", b"x"), (info, b"x")))


@pytest.mark.parametrize(
    "links",
    [
        [link("T/l", "/etc")],
        [link("T/l", "../../..")],
        [link("T/l", "../other")],
        [link("T/d/l", "../../T/good/..")],
        [link("T/a", "b/.."), link("T/b", "c/../../.."), entry("T/c/x", b"x")],
        [link("T/a", "d"), link("T/a/l", "../../../x"), entry("T/d/x", b"x")],
        [link("T/l", "")],
        [link("T/deep", "d/e"), link("T/out", "deep/../../../x"), entry("T/d/e/x", b"x")],
        [link("T/s", "."), link("T/o", "s/s/s/../../..")],
    ],
    ids=range(9),
)
def test_links_that_lead_out_are_refused(links, tar, open_up):
    with pytest.raises(DataError, match=r"leads out|twice"):
        open_up(tar(entry("T/good", b"x"), *links))


@pytest.mark.parametrize("order", [1, -1])
def test_nothing_is_written_through_a_link(order, tar, open_up, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    pair = [link("T/l", str(outside)), entry("T/l/evil", b"x")]
    with pytest.raises(DataError):
        open_up(tar(entry("T/good", b"x"), *pair[::order]))
    with pytest.raises(DataError):
        open_up(tar(entry("T/f", b"x"), *[link("T/f2", "f"), entry("T/f2", b"evil")][::order]))
    assert not list(outside.iterdir())


def test_links_inside_and_hard_links_work(tar, open_up, tmp_path):
    found = open_up(tar(entry("T/a/x", b"content"), link("T/b/y", "../a/x"), hard("T/h", "T/a/x")))
    assert found == {"a/x": 7, "h": 7}
    assert (tmp_path / "out/T/b/y").read_bytes() == b"content"
    assert (tmp_path / "out/T/h").stat().st_nlink == 1, "a copy: writing into one must not change the other"


def test_links_in_a_zip(zipped, open_up, tmp_path):
    info = zipfile.ZipInfo("T/l")
    info.create_system = 3
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    open_up(zipped(("T/a", b"content"), (info, b"a")))
    assert (tmp_path / "out/T/l").read_bytes() == b"content"
    with pytest.raises(DataError, match="leads out"):
        unpack(zipped(("T/a", b"content"), (info, b"/etc/passwd")), tmp_path / "other", tmp_path / "w")


@pytest.mark.parametrize("target", ["T/none", "../../etc/passwd", "T/l"])
def test_hard_links_to_anything_but_an_earlier_file(target, tar, open_up):
    with pytest.raises(DataError, match=r"hard link|leads out"):
        open_up(tar(entry("T/a", b"x"), link("T/l", "a"), hard("T/h", target)))


@pytest.mark.parametrize("what", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_devices_are_refused(what, tar, zipped, open_up):
    with pytest.raises(DataError, match="device or pipe"):
        open_up(tar(entry("T/a", b"x"), entry("T/dev", type=what)))
    info = zipfile.ZipInfo("T/p")
    info.create_system = 3
    info.external_attr = stat.S_IFIFO << 16
    with pytest.raises(DataError, match="device or pipe"):
        open_up(zipped(("T/a", b"x"), (info, b"")))


@pytest.mark.parametrize("pair", [("T/a", "T/a"), ("T/a", "T/a/b"), ("T/a/b", "T/a")])
def test_a_name_given_twice_is_refused(pair, tar, open_up):
    with pytest.raises(DataError, match="twice"):
        open_up(tar(entry(pair[0], b"first"), entry(pair[1], b"second")))


def test_what_is_there_is_not_overwritten(tar, open_up, tmp_path):
    (tmp_path / "out/T").mkdir(parents=True)
    (tmp_path / "out/T/mine").write_text("x")
    with pytest.raises(DataError, match=r"is there already.*move it away"):
        open_up(tar(entry("T/a", b"x")))
    assert (tmp_path / "out/T/mine").read_text() == "x"


@pytest.mark.parametrize("name", ["x.tar.gz", "x.zip"])
def test_bombs_are_refused_and_the_key_is_named(name, tar, zipped, open_up, monkeypatch):
    monkeypatch.setattr(archive, "SMALL", 1 << 16)
    data = bytes(4 << 20)
    path = zipped(("T/a", data)) if name == "x.zip" else tar(entry("T/a", data), name=name)
    assert path.stat().st_size < 10_000
    with pytest.raises(DataError, match=r"more than 100 times its size.*raise max_ratio"):
        open_up(path)
    assert open_up(path, max_ratio=2000) == {"a": 4 << 20}


def test_a_bomb_in_what_is_not_unpacked(tmp_path, tar, open_up, monkeypatch):
    monkeypatch.setattr(archive, "SMALL", 1 << 16)
    with pytest.raises(DataError, match="max_ratio"):
        open_up(tar(entry("T/a", b"x"), entry("T/._a", bytes(4 << 20)), name="x.tar.gz"))
    small = tar(entry("T/a", b"x"), name="y.tar")
    path = tmp_path / "padded.tar.gz"
    path.write_bytes(gzip.compress(small.read_bytes() + bytes(4 << 20)))
    with pytest.raises(DataError, match="max_ratio"):
        open_up(path)


def test_a_zip_whose_sizes_are_a_lie(zipped, open_up, monkeypatch):
    monkeypatch.setattr(archive, "SMALL", 1 << 16)
    path = zipped(("T/a", bytes(4 << 20)))
    honest = (4 << 20).to_bytes(4, "little")
    assert path.read_bytes().count(honest) == 2
    path.write_bytes(path.read_bytes().replace(honest, (100).to_bytes(4, "little")))
    with pytest.raises(DataError, match="damaged"):
        open_up(path)


def test_a_zip_is_refused_before_its_first_byte_is_written(zipped, open_up, monkeypatch):
    monkeypatch.setattr(archive, "SMALL", 1 << 16)
    monkeypatch.setattr(archive._Unpacker, "_write", lambda *_: pytest.fail("written"))
    with pytest.raises(DataError, match="max_ratio"):
        open_up(zipped(("T/small", b"x"), ("T/large", bytes(4 << 20))))


def test_what_is_written_counts_not_what_was_said(tar, tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "SMALL", 1 << 20)
    out = archive._Unpacker(tar(entry("T/a")), tmp_path / "content", 1.0)
    with pytest.raises(DataError, match="max_ratio"):
        out.add(archive_formats.Member(("a",), size=1, open=lambda: io.BytesIO(bytes(5 << 20))))
    assert (tmp_path / "content/a").stat().st_size <= 1 << 20


def test_a_header_that_would_fill_the_memory(open_up, tmp_path, monkeypatch):
    monkeypatch.setattr(archive_formats, "MAX_HEADER", 1 << 16)
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 20
    path = tmp_path / "x.tar"
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + b"a" * (1 << 20) + entry("T/a")[0].tobuf() + bytes(1024))
    with pytest.raises(DataError, match="a header of"):
        open_up(path)


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE])
@pytest.mark.parametrize("digits", [19, 400, 5000])
def test_a_size_that_no_file_has(digits, kind, tar, open_up):
    with pytest.raises(DataError, match="more than|damaged|cannot be unpacked|leads out"):
        open_up(tar(entry("T/a", b"x", pax_headers={"size": "9" * digits}, type=kind), entry("T/b", b"x")))


def test_too_many_entries_and_too_deep_ones(tar, open_up, monkeypatch):
    with pytest.raises(DataError, match="folders in each other"):
        open_up(tar(entry("a/" * 1500 + "x", b"x")))
    monkeypatch.setattr(archive, "MAX_FILES", 3)
    with pytest.raises(DataError, match="more than 3 entries"):
        open_up(tar(*(entry(f"T/{n}") for n in range(4))))


def test_a_disk_without_room(tar, zipped, open_up, monkeypatch):
    monkeypatch.setattr(archive.shutil, "disk_usage", lambda p: os.terminal_size((0, 0)) and type("U", (), {"free": 0}))
    with pytest.raises(DataError, match="can be used on the disk"):
        open_up(tar(entry("T/a", b"x")))


def test_a_disk_that_becomes_full(tar, open_up, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive._Unpacker, "_write", full)
    with pytest.raises(DataError, match="became full"):
        open_up(tar(entry("T/a", b"x")))


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.zip"])
def test_every_cut_is_noticed(name, tar, zipped, open_up, tmp_path):
    rng = np.random.default_rng(0)
    files = {f"T/{n}": rng.bytes(700) for n in range(6)}
    path = zipped(*files.items()) if name == "x.zip" else tar(*(entry(n, d) for n, d in files.items()), name=name)
    whole = path.read_bytes()
    last = 6 * (512 + 1024) if name == "x.tar" else len(whole) - 1  # of a plain tar only zeros may be missing
    for cut in rng.integers(0, last, 40):
        if name == "x.tar" and cut and cut % 1536 == 0:
            continue  # between two files: a tar may end there
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"damaged|no archive|holds no file"):
            open_up(path)


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.zip"])
def test_flipped_bytes_give_a_data_error_or_whole_files(name, tar, zipped, tmp_path):
    """Whatever a byte does to an archive: no other exception, nothing outside, and no half folder."""
    rng = np.random.default_rng(1)
    entries = [entry(f"T/{n}", rng.bytes(600)) for n in range(3)] + [link("T/l", "0"), hard("T/h", "T/0")]
    path = zipped(*((i.name, d) for i, d in entries[:3])) if name == "x.zip" else tar(*entries, name=name)
    whole = path.read_bytes()
    refused = 0
    box = tmp_path / "box"
    for number in range(100):
        data = bytearray(whole)
        for place in rng.integers(0, len(data), 1 + number % 3):
            data[place] = rng.integers(256)
        path.write_bytes(data)
        try:
            unpack(path, box / f"t{number}", box / "w")
        except DataError:
            refused += 1
            assert not (box / f"t{number}").exists()
    assert {p.name for p in tmp_path.iterdir()} == {name, "box"}
    assert not (box / "w").exists()
    assert refused > 10


def test_what_is_no_archive(open_up, tmp_path):
    path = tmp_path / "x.zip"
    for content, text in (
        (b"<!DOCTYPE html><html>", "web page"),
        (b"", "empty"),
        (gzip.compress(b"a" * 600), "begins"),
    ):
        path.write_bytes(content)
        assert kind(path) is None
        with pytest.raises(DataError, match=rf"no archive \(.*{text}"):
            open_up(path)


def test_a_zip_with_a_password(zipped, open_up):
    path = zipped(("T/a", b"x"))
    data = bytearray(path.read_bytes())
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="encrypted"):
        open_up(path)


def test_ctrl_c_leaves_nothing_behind(tar, open_up):
    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_up(tar(entry("T/a", b"x")), progress=stop)


def test_what_a_killed_run_left_is_cleared_away(tar, tmp_path):
    (tmp_path / "work/content/T").mkdir(parents=True)
    (tmp_path / "work/content/T/a").write_text("half")
    unpack(tar(entry("T/a", b"whole")), tmp_path / "T", tmp_path / "work")
    assert (tmp_path / "T/a").read_bytes() == b"whole"
