"""Where training reads its patches from: the disk, shared RAM, or the memory of the device itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np
import psutil
import torch
from torch import Tensor

from segspeed.data.cache import CacheEntry
from segspeed.data.sampling import PatchSampler, Turn, overlap
from segspeed.types import Batch, Shape3

DEVICE_SHARE = 0.3  # of the GPU's free memory that volumes may take beside the network
RAM_SHARE = 0.5  # of the available RAM


def volume_bytes(entries: Sequence[CacheEntry]) -> int:
    """Bytes of images and labels, uncompressed."""
    return sum(int(np.prod(e.image.shape)) * e.image.dtype.itemsize + e.label.nbytes for e in entries)


def choose_residence(requested: str, entries: Sequence[CacheEntry], device: torch.device) -> str:
    """One of "disk", "ram" and "device". On a CPU "auto" stays with the disk: its page cache is one copy for all processes."""
    if requested != "auto":
        return requested
    if device.type != "cuda":
        return "disk"
    needed = volume_bytes(entries)
    if needed <= DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]:
        return "device"
    return "ram" if needed <= RAM_SHARE * psutil.virtual_memory().available else "disk"


class DeviceLoader:
    """Endless raw batches cut out of volumes that lie on the device: no worker, no transfer. The same batches as
    `segspeed.loader.torch_loader.TorchLoader` gives."""

    def __init__(
        self, sampler: PatchSampler, *, batch: int, device: torch.device, first: int = 0, rank: int = 0, ranks: int = 1
    ) -> None:
        self.sampler, self.device, self.turn = sampler, device, Turn(batch, first, rank, ranks)
        self.volumes = [
            (torch.from_numpy(np.array(e.image[:])).to(device), torch.from_numpy(np.array(e.label)).to(device))
            for e in sampler.entries
        ]
        self.norms = torch.from_numpy(np.stack(sampler.norms)).to(device)

    def __iter__(self) -> Iterator[Batch]:
        patch, channels = self.sampler.patch, self.volumes[0][0].shape[0]
        for place in count():
            samples = self.turn.numbers(place)
            image = torch.empty((len(samples), channels, *patch), device=self.device)
            label = torch.empty((len(samples), *patch), dtype=torch.int16, device=self.device)
            numbers = []
            for row, sample in enumerate(samples):
                number, start = self.sampler.draw(sample)
                volume, mask = self.volumes[number]
                cut(volume, start, image[row], fill=self.norms[number, :, 2])
                cut(mask[None], start, label[row][None], fill=None)
                numbers.append(number)
            cases = tuple(self.sampler.entries[n].case_id for n in numbers)
            yield Batch(image, label, self.norms[numbers], torch.tensor(list(samples)), cases)


def cut(volume: Tensor, start: Shape3, out: Tensor, fill: Tensor | None) -> None:
    """Copy the patch at ``start`` of ``volume (C, D, H, W)`` into ``out (C, d, h, w)``; outside is ``fill (C,)`` or 0."""
    inside, target = overlap(start, out.shape[1:], volume.shape[1:])
    if any(s.stop - s.start < size for s, size in zip(inside, out.shape[1:], strict=True)):
        out.copy_(torch.zeros_like(out) if fill is None else fill.view(-1, 1, 1, 1).expand_as(out))
    whole = (slice(None),)
    out[whole + target] = volume[whole + inside].to(out.dtype)
