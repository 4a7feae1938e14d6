"""A run's network for other programs: python -m segspeed.export run=outputs/COHORT/NAME format=bundle|onnx|torchscript

onnx and torchscript write the bare network, which is run again from its file and compared with the run's, beside a JSON that says
what goes in and what comes out. bundle writes a MONAI bundle, which reads NIfTI files and writes label maps without segspeed.
The last (averaged) weights are taken, weights=best takes those chosen on validation. A target that exists is left alone.
"""

from __future__ import annotations

from segspeed.cli import Frame, door
from segspeed.config_inference import ExportConfig


def main(cfg: ExportConfig) -> int:
    """Export what ``cfg`` names; 0 when it is written and does what the run's network does."""
    from segspeed.deploy.folder import export_run  # torch and MONAI load here, after the settings are known to be right

    export_run(cfg)
    return 0


if __name__ == "__main__":
    door(main, Frame(ExportConfig, "export"))()
