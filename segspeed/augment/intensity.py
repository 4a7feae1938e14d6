"""Intensity transforms of single channels, on the rows that drew them; every other row is left as it is.

Rows are (sample, channel) pairs of an image viewed as ``(B * C, D, H, W)``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Matrix = Callable[[int, float], np.ndarray]  # (length, parameter) -> (length, length)


def normalise(image: Tensor, norm: Tensor) -> Tensor:
    """Clip ``image (B, C, D, H, W)`` to [low, high], subtract the mean, divide by std; ``norm`` is ``(B, C, 4)``."""
    low, high, mean, std = norm[..., None, None, None].unbind(2)
    return torch.clamp(image, low, high).sub_(mean).div_(std)


def normalise_(image: Tensor, norm: Tensor) -> Tensor:
    """`normalise` of one volume ``(C, D, H, W)`` with ``norm (C, 4)``, in place."""
    low, high, mean, std = norm[..., None, None, None].unbind(1)
    return torch.clamp(image, low, high, out=image).sub_(mean).div_(std)


def add_noise(image: Tensor, std: np.ndarray, seeds: np.ndarray) -> None:
    """Gaussian noise of standard deviation ``std (B,)``, in place; each sample from its own generator, so that its
    noise does not depend on its neighbours in the batch."""
    for row in np.flatnonzero(std):
        generator = torch.Generator(image.device).manual_seed(int(seeds[row]))
        noise = torch.randn(image.shape[1:], generator=generator, device=image.device, dtype=image.dtype)
        image[row].add_(noise, alpha=float(std[row]))


def multiply(rows: Tensor, factor: np.ndarray) -> None:
    """Brightness: times ``factor (B * C,)``, in place."""
    if (factor != 1).any():
        rows.mul_(_column(factor, rows))


def contrast(rows: Tensor, factor: np.ndarray) -> None:
    """Spread about the mean by ``factor (B * C,)``, clamped to the row's old range, in place."""
    picked = _picked(factor != 1, rows)
    if picked is None:
        return
    x = rows[picked]
    mean, (low, high) = x.mean((1, 2, 3), keepdim=True), _range(x)
    f = _column(factor, rows)[picked]
    rows[picked] = x.sub_(mean).mul_(f).add_(mean).clamp_(low, high)


def gamma(rows: Tensor, exponent: np.ndarray, invert: np.ndarray) -> None:
    """x to the power ``exponent (B * C,)`` on the row's range scaled to [0, 1], mean and standard deviation restored
    (nnU-Net's "retain stats"); where ``invert``, on negated intensities. In place."""
    picked = _picked(exponent != 1, rows)
    if picked is None:
        return
    x = rows[picked]
    sign = _column(np.where(invert, -1.0, 1.0), rows)[picked]
    x.mul_(sign)
    mean, (low, high) = x.mean((1, 2, 3), keepdim=True), _range(x)
    spread = _norm(x.sub_(mean))
    x.add_(mean - low).div_((high - low).clamp_min_(1e-7)).clamp_min_(0)
    x.log_().mul_(_column(exponent, rows)[picked]).exp_()  # several times faster than pow, which takes no vector units
    x.sub_(x.mean((1, 2, 3), keepdim=True))
    rows[picked] = x.mul_(sign * spread / _norm(x).clamp_min_(1e-7)).add_(mean * sign)


def blur(rows: Tensor, sigma: np.ndarray) -> None:
    """Gaussian of ``sigma (B * C,)`` voxels, mirrored at the borders, in place."""
    _separable(rows, sigma, sigma != 0, blur_matrix)


def low_resolution(rows: Tensor, zoom: np.ndarray) -> None:
    """Keep a share ``zoom (B * C,)`` of the voxels an axis (nearest), then enlarge linearly, in place."""
    _separable(rows, zoom, zoom != 1, low_resolution_matrix)


def blur_radius(sigma: float) -> int:
    """Voxels on either side that a Gaussian of ``sigma`` voxels reaches (cut at 4 sigma, as scipy does)."""
    return int(4 * sigma + 0.5)


def blur_matrix(length: int, sigma: float) -> np.ndarray:
    """Gaussian smoothing of a line as a matrix; the line is mirrored at its outer voxels (scipy's mode "mirror")."""
    at, weights = blur_taps(length, sigma)
    out = np.zeros((length, length), dtype=np.float32)
    for places, weight in zip(at, weights, strict=True):
        np.add.at(out, (np.arange(length), places), weight)
    return out


def blur_taps(length: int, sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """Voxels ``(taps, length)`` that each voxel of a line is made of, and their weights ``(taps,)`` float32."""
    radius = blur_radius(sigma)
    taps = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 * (taps / sigma) ** 2)
    period = max(1, 2 * (length - 1))
    at = np.abs(np.arange(length) + taps[:, None]) % period
    return np.minimum(at, period - at), (weights / weights.sum()).astype(np.float32)


def low_resolution_matrix(length: int, zoom: float) -> np.ndarray:
    """Nearest reduction to ``round(length * zoom)`` voxels, then linear enlargement, as one matrix."""
    kept, below, above, share = low_resolution_tables(length, zoom)
    out = np.zeros((length, length), dtype=np.float32)
    rows = np.arange(length)
    np.add.at(out, (rows, kept[below]), 1 - share)
    np.add.at(out, (rows, kept[above]), share)
    return out


def low_resolution_tables(length: int, zoom: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Voxels of a line that are kept, and for each voxel the two of them it lies between and the share of the second."""
    small = max(1, round(length * zoom))
    kept = np.clip(np.floor((np.arange(small) + 0.5) * length / small), 0, length - 1).astype(int)
    at = np.clip((np.arange(length) + 0.5) * small / length - 0.5, 0, small - 1)
    below = np.floor(at).astype(int)
    return kept, below, np.minimum(below + 1, small - 1), (at - below).astype(np.float32)


def _separable(rows: Tensor, values: np.ndarray, drawn: np.ndarray, matrix: Matrix) -> None:
    """A linear map a row, the same along D, H and W: three batched matrix products instead of a loop over rows."""
    picked = _picked(drawn, rows)
    if picked is None:
        return
    x = rows[picked]
    n, d, h, w = x.shape
    per_length = {
        length: torch.from_numpy(np.stack([matrix(length, float(v)) for v in values[drawn]])).to(x)
        for length in {d, h, w}
    }
    x = torch.bmm(x.reshape(n, d * h, w), per_length[w].transpose(1, 2)).view(n, d, h, w)
    x = torch.matmul(per_length[h].unsqueeze(1), x)
    rows[picked] = torch.bmm(per_length[d], x.reshape(n, d, h * w)).view(n, d, h, w)


def _range(x: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each row."""
    return x.amin((1, 2, 3), keepdim=True), x.amax(
        (1, 2, 3), keepdim=True
    )  # aminmax is not vectorised: 25 times slower


def _norm(centred: Tensor) -> Tensor:
    """Root of the sum of squares of each row: a standard deviation but for the count (torch's std is 50 times slower)."""
    return torch.linalg.vector_norm(centred.flatten(1), dim=1).view(-1, 1, 1, 1)


def _picked(drawn: np.ndarray, rows: Tensor) -> Tensor | None:
    if not drawn.any():
        return None
    return torch.from_numpy(np.flatnonzero(drawn)).to(rows.device)


def _column(values: np.ndarray, rows: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32)).to(rows.device).view(-1, 1, 1, 1)
