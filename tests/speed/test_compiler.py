import pytest
import torch

from segspeed.speed.compiler import ensure_compiler
from segspeed.types import SettingError


def test_a_missing_compiler_is_told_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(SettingError, match="C\\+\\+ compiler"):
        ensure_compiler(torch.device("cpu"))
    ensure_compiler(torch.device("cuda"))  # compiled by Triton
    (tmp_path / "g++").touch(mode=0o755)
    ensure_compiler(torch.device("cpu"))
    monkeypatch.setenv("CXX", "nowhere")
    with pytest.raises(SettingError):
        ensure_compiler(torch.device("cpu"))
