"""Whole volumes through a patch network: sliding window with Gaussian weights, finished a few planes at a time.

Windows are taken in order along one axis. As soon as no later window reaches a plane, its scores are complete and leave; so
what is held is as deep as one window, never classes times volume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

import torch
import torch.nn.functional as F
from monai.data.utils import compute_importance_map, dense_patch_slices
from torch import Tensor, nn

from segspeed.infer.decode import as_scores, probabilities
from segspeed.model.networks import as_logits
from segspeed.speed.oom import is_out_of_memory
from segspeed.speed.precision import Precision
from segspeed.types import LabelTable, Shape3

SIGMA = 0.125  # of the Gaussian over the patch's side, as in nnU-Net
Forward = Callable[[Tensor], Tensor]  # windows (n, C, d, h, w) to scores (n, K, d, h, w) float32


@dataclass(frozen=True)
class Window:
    """How a volume is cut: patch in voxels, overlap of neighbours as a share, windows a forward pass."""

    patch: Shape3
    overlap: float = 0.5
    batch: int = 2


def forward_of(
    model: nn.Module,
    precision: Precision,
    labels: LabelTable,
    mirror: Iterable[int] = (),
    swap_on_flip: Sequence[tuple[int, int]] = (),
) -> Forward:
    """The network on windows. ``mirror`` names axes (0 to 2 of D, H, W) over whose flips the probabilities are averaged; the
    result is logits again. ``swap_on_flip`` pairs the output channels that trade places when W (left and right) is
    mirrored."""
    axes = tuple(mirror)
    flips = [c for n in range(1, len(axes) + 1) for c in combinations(axes, n)]

    def plain(windows: Tensor) -> Tensor:
        with precision.autocast():
            return as_logits(model(windows)).float()

    def mirrored(windows: Tensor) -> Tensor:
        total = probabilities(plain(windows), labels)
        for flip in flips:
            over = [a + 2 for a in flip]
            scores = plain(windows.flip(over)).flip(over)
            total += probabilities(_swapped(scores, swap_on_flip) if 2 in flip else scores, labels)
        return as_scores(total.div_(len(flips) + 1), labels)

    return mirrored if flips else plain


def _swapped(scores: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    order = list(range(scores.shape[1]))
    for a, b in pairs:
        order[a], order[b] = order[b], order[a]
    return scores[:, order]


@torch.inference_mode()
def finished_planes(forward: Forward, volume: Tensor, window: Window, axis: int = 0) -> Iterator[tuple[int, Tensor]]:
    """First plane along ``axis`` and scores ``(K, D, H, W)`` float32 of the next planes that are finished, in order.

    ``volume (C, D, H, W)`` is normalised. Windows lie as MONAI's sliding_window_inference lays them; one smaller than the
    patch is padded evenly with zeros, as in training. Scores are kept on the volume's device where they fit, else in RAM.
    What is yielded is valid until the next one is asked for.
    """
    padded, before = _padded(volume, window.patch)
    size, patch = tuple(padded.shape[1:]), window.patch
    steps = [max(1, int(p * (1 - window.overlap))) if p < n else p for p, n in zip(patch, size, strict=True)]
    starts = sorted({tuple(int(s.start) for s in where) for where in dense_patch_slices(size, patch, steps)})
    starts.sort(key=lambda s: s[axis])
    weight = compute_importance_map(
        patch, mode="gaussian", sigma_scale=SIGMA, device=volume.device, dtype=torch.float32
    )
    weight = weight.clamp_min(max(float(weight[weight != 0].min()), 1e-3))
    layers = [(at, list(group)) for at, group in groupby(starts, key=lambda s: s[axis])]
    memo: dict[tuple[float, ...], Tensor] = {}
    depth = [patch[a] if a == axis else n for a, n in enumerate(size)]
    held: Tensor | None = None
    weights = torch.zeros(depth, device=volume.device)
    for number, (at, places) in enumerate(layers):
        for place, scores in _scored(forward, padded, places, window, memo):
            if held is None:
                held = _buffer((scores.shape[0], *depth), volume.device)
                weights = weights.to(held.device)
                weight = weight.to(held.device)
            where = tuple(slice(0, patch[a]) if a == axis else slice(s, s + patch[a]) for a, s in enumerate(place))
            held[(slice(None),) + where].addcmul_(scores.to(held.device), weight)
            weights[where] += weight
        assert held is not None
        last = number + 1 == len(layers)
        done = patch[axis] if last else layers[number + 1][0] - at
        first, stop = max(at, before[axis]), min(at + done, before[axis] + volume.shape[axis + 1])
        if stop > first:
            cut = [slice(b, b + n) for b, n in zip(before, volume.shape[1:], strict=True)]
            cut[axis] = slice(first - at, stop - at)
            ready = held[(slice(None),) + tuple(cut)]
            yield first - before[axis], ready.div_(weights[tuple(cut)])
        if not last:
            _advance(held, axis + 1, done)
            _advance(weights, axis, done)


def predict_logits(forward: Forward, volume: Tensor, window: Window) -> Tensor:
    """Scores ``(K, D, H, W)`` float32 of one normalised volume ``(C, D, H, W)``, all at once, on its device."""
    out: Tensor | None = None
    for first, scores in finished_planes(forward, volume, window):
        if out is None:
            out = torch.empty((scores.shape[0], *volume.shape[1:]), device=volume.device)
        out[:, first : first + scores.shape[1]] = scores
    assert out is not None
    return out


def _padded(volume: Tensor, patch: Shape3) -> tuple[Tensor, list[int]]:
    """The volume with zeros around it up to the patch, and how many voxels came before it an axis."""
    missing = [max(p - n, 0) for p, n in zip(patch, volume.shape[1:], strict=True)]
    if not any(missing):
        return volume, [0, 0, 0]
    before = [m // 2 for m in missing]
    sides = [v for b, m in zip(reversed(before), reversed(missing), strict=True) for v in (b, m - b)]
    return F.pad(volume, sides), before


def _scored(
    forward: Forward,
    volume: Tensor,
    places: Sequence[tuple[int, ...]],
    window: Window,
    memo: dict[tuple[float, ...], Tensor],
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Scores of the windows at ``places``. Windows that hold one value throughout (air, padding) are equal, so the network
    sees one of them."""
    waiting: list[tuple[tuple[int, ...], Tensor]] = []
    for place in places:
        d, h, w = (slice(s, s + p) for s, p in zip(place, window.patch, strict=True))
        piece = volume[:, d, h, w]
        flat = piece.flatten(1)
        if bool((flat[:, :1] == flat[:, -1:]).all()) and bool((flat == flat[:, :1]).all()):
            value = tuple(flat[:, 0].tolist())
            if value not in memo:
                memo[value] = forward(piece[None])[0]
            yield place, memo[value]
            continue
        waiting.append((place, piece))
        if len(waiting) == window.batch:
            yield from _run(forward, waiting)
            waiting = []
    if waiting:
        yield from _run(forward, waiting)


def _run(
    forward: Forward, waiting: Sequence[tuple[tuple[int, ...], Tensor]]
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    places = [place for place, _ in waiting]
    try:
        yield from zip(places, forward(torch.stack([piece for _, piece in waiting])), strict=True)
        return
    except (RuntimeError, MemoryError) as error:
        if len(waiting) == 1 or not is_out_of_memory(error):
            raise
    for place, piece in waiting:  # one at a time where a batch of them does not fit
        yield place, forward(piece[None])[0]


def _buffer(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Zeros on the device where half of its free memory holds them, else in RAM."""
    if device.type == "cuda":
        needed = 4 * int(torch.tensor(shape).prod())
        if needed > 0.5 * torch.cuda.mem_get_info(device)[0]:
            return torch.zeros(shape)
    return torch.zeros(shape, device=device)


def _advance(held: Tensor, axis: int, by: int) -> None:
    """Move the content ``by`` planes towards the front, zeros behind it, in pieces that do not overlap."""
    length = held.shape[axis]
    for start in range(0, length - by, by):
        size = min(by, length - by - start)
        held.narrow(axis, start, size).copy_(held.narrow(axis, start + by, size))
    held.narrow(axis, max(length - by, 0), min(by, length)).zero_()
