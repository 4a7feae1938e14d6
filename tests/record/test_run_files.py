import json

import pytest
import torch

from segspeed.jsonio import write_json
from segspeed.record.checkpoints import load_checkpoint, load_last, save_atomic, save_last
from segspeed.record.run_folder import RunFolder, choose_folder, differing_keys, flatten
from segspeed.types import DataError, RunStopped


def test_last_and_previous(tmp_path):
    for step in (1, 2, 3):
        save_last({"step": step}, tmp_path)
    assert load_checkpoint(tmp_path / "last.pt")["step"] == 3
    assert load_checkpoint(tmp_path / "previous.pt")["step"] == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.pt", "previous.pt"]


def test_a_damaged_last_falls_back_and_says_so(tmp_path):
    save_last({"model": {}, "step": 1, "w": torch.arange(1000)}, tmp_path)
    save_last({"model": {}, "step": 2, "w": torch.arange(1000)}, tmp_path)
    whole = (tmp_path / "last.pt").read_bytes()
    (tmp_path / "last.pt").write_bytes(whole[: len(whole) // 2])
    state, notes = load_last(tmp_path)
    assert state["step"] == 1
    assert len(notes) == 1
    assert "last.pt" in notes[0]


def test_no_checkpoint(tmp_path):
    assert load_last(tmp_path) == (None, [])


def test_a_failed_save_leaves_the_old_file(tmp_path):
    save_atomic({"step": 1}, tmp_path / "last.pt")
    with pytest.raises(Exception, match="pickle|local object"):
        save_atomic({"step": lambda: 2}, tmp_path / "last.pt")
    assert load_checkpoint(tmp_path / "last.pt") == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


class Evil:
    def __reduce__(self):
        return (print, ("code ran",))


def test_loading_runs_no_code(tmp_path, capsys):
    torch.save({"model": Evil()}, tmp_path / "last.pt")
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        load_checkpoint(tmp_path / "last.pt")
    with pytest.raises(RunStopped):
        load_last(tmp_path)
    assert "code ran" not in capsys.readouterr().out


def test_folder_names(tmp_path):
    assert choose_folder(tmp_path, "heart", "first").path == tmp_path / "heart" / "first"
    one = choose_folder(tmp_path, "heart", None)
    assert one.path.is_dir()
    assert choose_folder(tmp_path, "heart", None).path != one.path


def test_differing_keys_name_what_matters_and_nothing_else():
    old = {"train": {"steps": 10}, "run": {"root": "a"}, "loader": {"workers": 1, "foreground": 0.5}, "seed": 0}
    new = {"train": {"steps": 20}, "run": {"root": "b"}, "loader": {"workers": 2, "foreground": 0.3}, "seed": 0}
    assert differing_keys(old, new) == ["loader.foreground: 0.5 -> 0.3", "train.steps: 10 -> 20"]
    assert differing_keys(old, old) == []
    assert flatten({"a": {"b": [1, 2]}, "c": {}}) == [("a.b", [1, 2]), ("c", {})]


def test_json_is_whole_and_has_no_nan(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"mean_dice": 0.9})
    with pytest.raises(ValueError, match="(?i)json"):
        write_json(path, {"mean_dice": float("nan")})
    assert json.loads(path.read_text()) == {"mean_dice": 0.9}


def test_a_folder_belongs_to_one_process_at_a_time(tmp_path):
    folder = RunFolder(tmp_path / "a" / "run")
    with folder.locked():
        (folder.path / "result.json").write_text("{}")
        with pytest.raises(DataError, match="another process"), folder.locked():
            pass
    with folder.locked():
        pass
    assert folder.finished


def test_a_run_that_came_to_nothing_leaves_no_folder(tmp_path):
    folder = RunFolder(tmp_path / "a" / "run")
    with pytest.raises(DataError), folder.locked():
        raise DataError("no")
    assert not folder.path.exists()


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    save_atomic({"step": 1}, tmp_path / "last.pt")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.save", full)
    with pytest.raises(RunStopped, match="No space left"):
        save_atomic({"step": 2}, tmp_path / "last.pt")
    monkeypatch.undo()
    assert load_checkpoint(tmp_path / "last.pt") == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_jobs_that_start_in_the_same_second_get_folders_of_their_own(tmp_path):
    made = [choose_folder(tmp_path, "c", None).path for _ in range(5)]
    assert len(set(made)) == 5
    assert all(p.is_dir() for p in made)


def test_a_damaged_last_does_not_push_out_the_good_one_before_it(tmp_path):
    save_last({"step": 1}, tmp_path)
    save_last({"step": 2}, tmp_path)
    (tmp_path / "last.pt").write_bytes(b"half")
    save_last({"step": 3}, tmp_path)
    assert load_checkpoint(tmp_path / "previous.pt")["step"] == 1
    assert load_checkpoint(tmp_path / "last.pt")["step"] == 3


def test_a_checkpoint_without_weights_counts_as_damaged(tmp_path):
    save_last({"model": {}, "step": 1}, tmp_path)
    save_last({}, tmp_path)
    state, notes = load_last(tmp_path)
    assert state["step"] == 1
    assert "no weights" in notes[0]
    (tmp_path / "previous.pt").unlink()
    with pytest.raises(RunStopped, match="no checkpoint of"):
        load_last(tmp_path)


def test_an_empty_checkpoint_counts_as_damaged(tmp_path):
    save_last({"model": {}, "step": 1}, tmp_path)
    save_last({"model": {}, "step": 2}, tmp_path)
    (tmp_path / "last.pt").write_bytes(b"")
    assert load_last(tmp_path)[0]["step"] == 1
