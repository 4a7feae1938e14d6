"""Globs that name cases. The files are empty: nobody reads them."""

import os
import unicodedata

import nibabel as nib
import numpy as np
import pytest

from segspeed.data.files import load_nifti, not_a_file
from segspeed.data.wildcards import as_on_disk, by_wildcard, folders_below, is_pattern, start_of
from segspeed.types import DataError

NFC = "Müller_é"
NFD = unicodedata.normalize("NFD", NFC)


@pytest.fixture
def root(tmp_path):
    """root(names): a folder with these empty files; gives it."""

    def make(*names):
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return tmp_path

    return make


def found(base, pattern):
    return {key: path.relative_to(base).as_posix() for key, path in by_wildcard(base, pattern, "k").files.items()}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*_ct.nii.gz", {"p1": "p1_ct.nii.gz", "p3": "p3_ct.Nii.Gz"}),
        ("*_ct.nii", {"p2": "p2_ct.NII"}),
        ("*_ct.NII*", {"p1": "p1_ct.nii.gz", "p2": "p2_ct.NII", "p3": "p3_ct.Nii.Gz"}),
        ("*_ct*", {"p1": "p1_ct.nii.gz", "p2": "p2_ct.NII", "p3": "p3_ct.Nii.Gz"}),
        ("p[!13]_?t.nii", {"2_c": "p2_ct.NII"}),
        ("p[1-2]_ct.*", {"1": "p1_ct.nii.gz", "2": "p2_ct.NII"}),
        ("P*.nii.gz", {"4_ct": "P4_ct.nii.gz"}),
    ],
)
def test_endings_in_any_case_of_letters_and_the_rest_as_written(pattern, expected, root):
    base = root("p1_ct.nii.gz", "p2_ct.NII", "p3_ct.Nii.Gz", "P4_CT.nii.gz", "p5_ct.txt", "._p1_ct.nii.gz")
    if pattern.startswith("P"):
        (base / "P4_CT.nii.gz").rename(base / "P4_ct.nii.gz")
    assert found(base, pattern) == expected


def test_links_to_folders_are_followed_once_each(root):
    base = root("a/x.nii", "b/c/y.nii", "elsewhere/z.nii", "top/own.nii")
    (base / "a/circle").symlink_to(base / "a")
    (base / "b/to_a").symlink_to(base / "a")
    (base / "a/to_b").symlink_to(base / "b")
    (base / "a/up").symlink_to(base)
    assert found(base, "**/*.nii") == {
        "a_x": "a/x.nii", "b_c_y": "b/c/y.nii", "elsewhere_z": "elsewhere/z.nii", "top_own": "top/own.nii",
    }  # fmt: skip
    (base / "top/one").symlink_to(base / "elsewhere")
    (base / "top/two").symlink_to(base / "elsewhere")
    (base / "top/broken").symlink_to(base / "nowhere")
    (base / "top/itself").symlink_to(base / "top/itself")
    assert found(base, "top/**/*.nii") == {"own": "top/own.nii", "one_z": "top/one/z.nii"}, "the first of two links"
    assert found(base, "top/*/z.nii") == {"one": "top/one/z.nii", "two": "top/two/z.nii"}, "* follows what it matches"
    assert [p.name for p in folders_below(base / "b")] == ["b", "c", "to_a"]


def test_both_spellings_of_an_accent_are_one(root):
    base = root(f"{NFD}/{NFC}_ct.nii", f"{NFD}/{unicodedata.normalize('NFD', 'ö')}_ct.nii")
    assert as_on_disk(base / NFC) == base / NFD
    assert as_on_disk(base / NFC / f"{NFD}_ct.nii") == base / NFD / f"{NFC}_ct.nii"
    assert as_on_disk(base / "ü") == base / "ü"
    assert as_on_disk(base / ("ü" * 300)) == base / ("ü" * 300)
    for folder in (NFC, NFD):
        assert set(by_wildcard(base, f"{folder}/*_ct.nii", "k").files) == {NFC, "ö"}
    for name in (NFC, NFD):
        assert set(by_wildcard(base, f"*/{name}_ct.nii", "k").files) == {NFC}


def test_a_name_with_brackets_is_no_pattern_where_it_exists(root):
    base = root("s [1]/p[2].nii", "s 1/p2.nii")
    one = by_wildcard(base, "s [1]/p[2].nii", "k")
    assert (dict(one.files), one.wild) == ({"p[2]": base / "s [1]/p[2].nii"}, False)
    assert not is_pattern(base / "s [1]/p[2].nii")
    assert is_pattern(base / "s [1]/p[3].nii")
    assert start_of(base / "s [1]/*.nii") == base / "s [1]"
    assert start_of(base / "s [1]") == base / "s [1]"


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("nowhere/deep/*.nii", r"there is no folder .*/nowhere$"),
        ("a/*_x.nii", r"matches no .nii or .nii.gz file in .*/a$"),
        ("a/*.txt", r"1 other files match"),
        ("a", r"names a folder; name its files: k=a/\*\.nii\.gz"),
        ("a/n.txt", "is no .nii"),
        (" ", "k is empty"),
        ("a/[z-a].nii", "brackets hold no set"),
        ("*/*.nii*", "would both be case 'a_x'"),
    ],
)
def test_what_matches_nothing_says_where(pattern, text, root):
    base = root("a/n.txt", "a/x.nii", "a/x.nii.gz")
    with pytest.raises(DataError, match=text):
        by_wildcard(base, pattern, "k")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_cannot_be_read_is_named(root):
    base = root("a/x.nii", "b/y.nii")
    (base / "b").chmod(0)
    try:
        with pytest.raises(DataError, match=r"the folder .*/b cannot be read: Permission denied"):
            by_wildcard(base, "**/*.nii", "k")
    finally:
        (base / "b").chmod(0o700)


@pytest.mark.parametrize("name", ["x.Nii.Gz", "x.nIi", "x.NII.gz", "x.nii.GZ", "x.nii", "x.NII"])
@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
def test_endings_in_any_case_of_letters_are_read(name, kind, tmp_path):
    values = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    plain = tmp_path / f"plain{'.nii.gz' if name.lower().endswith('gz') else '.nii'}"
    nib.save(kind(values, np.diag([2.0, 3, 4, 1])), plain)
    path = plain.rename(tmp_path / name)
    image = load_nifti(path)
    assert np.array_equal(np.asanyarray(image.dataobj), values)
    assert type(image) is kind
    assert image.affine[1, 1] == 3


def test_what_is_no_file_is_said(tmp_path):
    (tmp_path / "file.nii").touch()
    os.mkfifo(tmp_path / "pipe.nii")
    (tmp_path / "loop.nii").symlink_to("loop.nii")
    (tmp_path / "gone.nii").symlink_to("nowhere.nii")
    assert not_a_file(tmp_path / "file.nii") is None
    for name, text in (
        ("pipe.nii", "pipe.nii is not a regular file"), ("none.nii", "does not exist: none.nii"), ("", "is a folder"),
        ("loop.nii", "Too many levels"), ("gone.nii", "whose target is not there"), ("x" * 300, "File name too long"),
        ("a\0b", "null byte"), ("file.nii/x.nii", "does not exist"),
    ):  # fmt: skip
        assert text in (not_a_file(tmp_path / name) or "")
