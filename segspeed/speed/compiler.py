"""What torch.compile needs."""

from __future__ import annotations

import os
import shutil

import torch

from segspeed.types import SettingError


def ensure_compiler(device: torch.device) -> None:
    """On a CPU torch.compile writes C++, and without a compiler it fails in the first step with a page of text.

    Raises SettingError.
    """
    named = os.environ.get("CXX")
    if device.type == "cpu" and not any(shutil.which(c) for c in ([named] if named else ["g++", "clang++"])):
        raise SettingError(
            "compile=true needs a C++ compiler (g++ or clang++) to train on a CPU: install one, or compile=false"
        )
