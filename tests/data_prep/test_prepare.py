import os
from pathlib import Path

from data_prep import check, prepare


def entries(cfg):
    return sorted(p.name for p in Path(cfg.run.root, "cache", "balls").iterdir())


def test_other_settings_keep_their_entries_until_pruned(tiny, capsys):
    first = tiny()
    folder = first.data.kwargs["root"]
    assert prepare.main(first) == 0
    before = entries(first)
    assert len(before) == 4
    assert prepare.main(tiny("plan.spacing=[2,1,1]", "plan.features=auto", folder=folder)) == 0
    assert len(entries(first)) == 8
    assert "4 entries of this cohort belong to other settings" in capsys.readouterr().out
    assert prepare.main(tiny("cache.prune=true", folder=folder)) == 0
    assert entries(first) == before
    assert "Deleted 4 entries" in capsys.readouterr().out


def test_verify_sees_a_file_that_changed_behind_its_size_and_time(tiny, capsys, write):
    import nibabel as nib
    import numpy as np

    cfg = tiny()
    folder = Path(cfg.data.kwargs["root"])
    path = folder / "imagesTr" / "b_01.nii.gz"
    plain = folder / "imagesTr" / "b_01.nii"  # uncompressed, so that other voxels take as many bytes
    array = np.asarray(nib.load(path).dataobj)
    write(plain, array)
    about = (folder / "dataset.json").read_text()
    (folder / "dataset.json").write_text(about.replace("imagesTr/b_01.nii.gz", "imagesTr/b_01.nii"))
    assert prepare.main(cfg) == 0
    stat = plain.stat()
    write(plain, array + 1)
    os.utime(plain, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    capsys.readouterr()
    assert prepare.main(cfg) == 0
    assert "0 of 4 cases built" in capsys.readouterr().out, "size and time say that nothing changed"
    assert prepare.main(tiny("cache.verify=true", folder=folder)) == 0
    assert "1 of 4 cases built" in capsys.readouterr().out


def test_check_names_an_unusable_fold(tiny, capsys):
    cfg = tiny("data.fold=0", cases=1)
    assert check.main(cfg) == 1
    assert "at least 2" in capsys.readouterr().out
