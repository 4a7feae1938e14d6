"""Batch normalisation and small micro-batches do not go together (Wu & He 2018)."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

ENOUGH = 8  # samples a micro-batch, from which on its statistics are worth something


def batch_norm_layers(model: nn.Module) -> list[str]:
    """Names of the layers that normalise by statistics over the micro-batch of one process."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
    ]


def batch_norm_caution(model: nn.Module, micro_batch: int) -> str | None:
    """What to do about BatchNorm under ``micro_batch`` patches; None where there is nothing to do."""
    layers = batch_norm_layers(model)
    if not layers or micro_batch >= ENOUGH:
        return None
    return (
        f"{len(layers)} BatchNorm layers ({layers[0]}, ...) take their statistics from {micro_batch} patch"
        f"{'es' * (micro_batch > 1)} at a time, and accumulation does not help: every micro-batch has its own. Use instance "
        "normalisation (model.norm=instance for segresnet_ds, model.norm_name=instance for swin_unetr and MONAI's DynUNet; "
        "model=dynunet has it), or on several GPUs torch.nn.SyncBatchNorm.convert_sync_batchnorm in your network's function"
    )
