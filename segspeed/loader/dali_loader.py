"""Patches from the cache through NVIDIA DALI: read in worker processes, augmented in a graph on the CPU or the GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from segspeed.augment.draw import draw
from segspeed.augment.intensity import blur_radius
from segspeed.augment.spatial import voxel_matrices
from segspeed.config import AugmentConfig
from segspeed.data.sampling import PatchSampler, Turn
from segspeed.data.wholeness import refuse_shortened
from segspeed.speed.cpus import available_cpus
from segspeed.types import Batch, DataError, RunStopped, Shape3, Triple


@dataclass(frozen=True)
class SampleSource:
    """Called by DALI in its workers: sample number in, everything the graph needs out."""

    sampler: PatchSampler
    augment: AugmentConfig
    patch: Shape3
    spacing: Triple
    seed: int
    turn: Turn
    swap_on_flip: tuple[tuple[int, int], ...]

    def __call__(self, info: Any) -> tuple[np.ndarray, ...]:
        return self.sample(self.turn.number(int(info.idx_in_epoch)))

    def sample(self, index: int) -> tuple[np.ndarray, ...]:
        """Inputs of the graph in the order of `segspeed.loader.dali_graph.INPUTS`."""
        refuse_shortened([self.sampler.entries[self.sampler.draw(index)[0]]])
        number, image, label = self.sampler.read(index)
        channels = len(image)
        p = draw(self.augment, seed=self.seed, indices=[index], channels=channels)
        turned = bool((p.rotation != 0).any() or p.scale[0] != 1)
        flip = p.flip[0]
        if flip[2]:
            label = swapped(label, self.swap_on_flip)
        noise = np.zeros((1, 1, 1, 1), np.float32)
        if p.noise[0]:
            rng = np.random.Generator(np.random.Philox(int(p.noise_seed[0])))
            noise = rng.standard_normal((*self.patch, channels), dtype=np.float32) * np.float32(p.noise[0])
        window = np.array([[s, 2 * blur_radius(s) + 1 if s else 1] for s in p.blur[0]], np.float32)
        small = [[max(1, round(n * z)) for n in self.patch] if z != 1 else [0, 0, 0] for z in p.zoom[0]]
        return (
            np.ascontiguousarray(image.transpose(1, 2, 3, 0)),
            np.ascontiguousarray(label[..., None].astype(np.int16)),
            np.ascontiguousarray(self.sampler.norms[number].T, dtype=np.float32),
            np.array(number, np.int32),
            np.array(turned, bool),
            dali_matrix(voxel_matrices(p, self.spacing)[0], image.shape[1:], self.patch),
            np.array([*flip, flip.any()], np.int32),
            np.array(p.noise[0] != 0, bool),
            noise,
            window,
            p.brightness[0].astype(np.float32),
            p.contrast[0].astype(np.float32),
            np.array(small, np.float32),
            np.array(p.gamma[0], np.float32),
            np.array(-1.0 if p.invert[0] else 1.0, np.float32),
        )


def dali_matrix(offsets: np.ndarray, source: Sequence[int], patch: Shape3) -> np.ndarray:
    """``(3, 4)`` from output to input in DALI's order (x, y, z) = (W, H, D), voxel centres at halves.

    ``offsets`` maps offsets from the centre, output to input, in (D, H, W).
    """
    out = np.array(patch, dtype=float)
    centre = (np.array(source) - np.array(patch)) // 2 + out / 2  # of the patch within what was read
    shift = centre - offsets @ (out / 2)
    return np.ascontiguousarray(np.concatenate([offsets[::-1, ::-1], shift[::-1, None]], axis=1), dtype=np.float32)


def swapped(label: np.ndarray, pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """Class indices (any shape) with the classes of each pair exchanged."""
    if not pairs:
        return label
    table = np.arange(max(int(label.max()), *(max(p) for p in pairs)) + 1).astype(label.dtype)
    for a, b in pairs:
        table[a], table[b] = b, a
    return table[label]


class DaliLoader:
    """Endless augmented batches from sample ``first`` on; the same for any number of workers."""

    augments = True  # the batches are normalised and augmented already

    def __init__(
        self,
        sampler: PatchSampler,
        *,
        batch: int,
        augment: AugmentConfig,
        patch: Shape3,
        spacing: Triple,
        seed: int,
        device: torch.device,
        first: int = 0,
        workers: int = 1,
        prefetch: int = 2,
        swap_on_flip: Sequence[tuple[int, int]] = (),
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        try:
            import nvidia.dali  # noqa: F401

            from segspeed.loader.dali_graph import build_pipeline
        except ImportError as error:
            raise DataError(
                "loader=dali needs NVIDIA DALI (pip install nvidia-dali-cuda120, Linux only); use loader=torch without it"
            ) from error
        self.sampler, self.turn = sampler, Turn(batch, first, rank, ranks)
        pairs: Any = tuple(map(tuple, swap_on_flip))
        source = SampleSource(sampler, augment, patch, spacing, seed, self.turn, pairs)
        start = tuple((s - p) // 2 for s, p in zip(sampler.patch, patch, strict=True))
        self.pipeline = build_pipeline(
            source,
            batch=batch,
            channels=sampler.norms[0].shape[0],
            patch=patch,
            start=start,  # type: ignore[arg-type]
            workers=workers,
            threads=max(1, min(available_cpus(), math.ceil(batch / 2))),
            prefetch=prefetch,
            device_id=None if device.type != "cuda" else (device.index or 0),
        )

    def __iter__(self) -> Iterator[Batch]:
        for place in count():
            samples = self.turn.numbers(place)
            image, label, number = self._run(samples)
            numbers = np.asarray(number.as_tensor()).ravel()
            yield Batch(
                from_dlpack(image.as_tensor()).clone(),
                from_dlpack(label.as_tensor()).clone(),
                torch.from_numpy(np.stack([self.sampler.norms[n] for n in numbers])),
                torch.tensor(list(samples)),
                tuple(self.sampler.entries[n].case_id for n in numbers),
            )

    def _run(self, samples: Sequence[int]) -> Any:
        try:
            return self.pipeline.run()
        except Exception as error:  # DALI raises plain ones; all of them end the run, with the cases at hand
            cases = {self.sampler.entries[self.sampler.draw(i)[0]].case_id for i in samples}
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise RunStopped(
                f"DALI could not make the batch of samples {samples[0]} to {samples[-1]} or one just after it "
                f"(cases {', '.join(sorted(cases))}): {lines[-1] if lines else type(error).__name__}"
            ) from error
