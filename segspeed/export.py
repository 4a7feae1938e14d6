"""A trained network for elsewhere: python -m segspeed.export run=outputs/COHORT/NAME format=bundle

format=bundle       a MONAI bundle, which `python -m monai.bundle run` predicts with from NIfTI files
format=onnx         the network alone as ONNX, checked in onnxruntime (pip install 'segspeed[export]')
format=torchscript  the network alone as TorchScript

A JSON file beside the network says what to do around it: channels, spacing, normalisation, patch, classes. The last (averaged)
weights are taken, or weights=best. What lies in the folder target already is never touched.
"""

from __future__ import annotations

from segspeed.cli import Frame, door
from segspeed.config_inference import ExportConfig
from segspeed.types import SettingError


def main(cfg: ExportConfig) -> int:
    """Write what ``cfg`` names; 0 when it is there, whole and compared."""
    from pathlib import Path

    from segspeed.deploy.network import require_onnx

    target = Path(cfg.target) if cfg.target else Path(cfg.run) / cfg.format
    if target.exists() or target.is_symlink():
        raise SettingError(f"{target} is there already and is not touched; name another target=FOLDER")
    if cfg.format == "onnx":
        require_onnx()
    import torch

    from segspeed import build
    from segspeed.deploy.write import export_run
    from segspeed.record.live import say
    from segspeed.trained import load_run

    how = cfg.inference
    device = build.device_from(how)
    run = load_run(Path(cfg.run), how, torch.device(device))
    exported, about = export_run(run, cfg.format, target, cfg.weights, cfg.tolerance)
    dice = about.get("mean_dice")
    say(
        f"Compared with the trained network: largest difference {exported.difference:.2g} at logits up to {exported.largest:.3g}"
        + ("" if exported.any_batch else "; it takes single windows only")
    )
    say(f"{cfg.weights} weights, mean Dice {'not known' if dice is None else f'{dice:.3f}'}. Written: {target}")
    if cfg.format == "bundle":
        say(
            f"Next: python -m monai.bundle run --config_file {target}/configs/inference.json --bundle_root {target} "
            f"--meta_file {target}/configs/metadata.json --dataset_dir IMAGES --output_dir MAPS"
        )
    return 0


if __name__ == "__main__":
    door(main, Frame(ExportConfig, "export"))()
