"""Rotation, scale and flip in one resampling; flips alone move voxels without touching their values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from segspeed.augment.draw import Params
from segspeed.types import Shape3, Triple


def spatial(
    image: Tensor,
    label: Tensor,
    params: Params,
    patch: Shape3,
    spacing: Triple,
    swap_on_flip: Sequence[tuple[int, int]] = (),
) -> tuple[Tensor, Tensor]:
    """Turn, scale and mirror ``image (B, C, D, H, W)`` and ``label (B, D, H, W)`` about their centre into ``patch``.

    Angles are angles in mm, whatever the spacing. The image is interpolated linearly and the label takes its
    nearest voxel, both through the same matrix; outside is 0 in both.
    """
    turned = is_turned(params)
    out_image, out_label = _centre(image, patch), _centre(label, patch)
    if out_image.data_ptr() == image.data_ptr():
        out_image, out_label = image.clone(), label.clone()
    else:
        out_image, out_label = out_image.contiguous(), out_label.contiguous()
    if turned.any():
        _turn(image, label, voxel_matrices(params, spacing), turned, out_image, out_label)
    for axes in product((False, True), repeat=3):
        which = (params.flip == axes).all(1) & ~turned
        if any(axes) and which.any():
            rows = torch.from_numpy(np.flatnonzero(which)).to(image.device)
            over = [a for a in range(3) if axes[a]]
            out_image[rows] = out_image[rows].flip([a + 2 for a in over])
            out_label[rows] = out_label[rows].flip([a + 1 for a in over])
    mirrored = params.flip[:, 2]
    if swap_on_flip and mirrored.any():
        rows = torch.from_numpy(np.flatnonzero(mirrored)).to(image.device)
        part = out_label[rows]
        swapped = part.clone()
        for a, b in swap_on_flip:
            swapped[part == a] = b
            swapped[part == b] = a
        out_label[rows] = swapped
    return out_image, out_label


def is_turned(params: Params) -> np.ndarray:
    """``(B,)`` bool: the samples that are resampled. A flip alone moves voxels."""
    return np.asarray((params.rotation != 0).any(1) | (params.scale != 1))


def swap_table(pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """New class index for each old one (int16), with the classes of each pair exchanged; empty where there are no pairs."""
    table = np.arange(32768 if pairs else 0, dtype=np.int16)
    for a, b in pairs:
        table[a], table[b] = b, a
    return table


def _centre(tensor: Tensor, patch: Shape3) -> Tensor:
    start = [(n - p) // 2 for n, p in zip(tensor.shape[-3:], patch, strict=True)]
    d, h, w = (slice(s, s + p) for s, p in zip(start, patch, strict=True))
    return tensor[..., d, h, w]


def _turn(
    image: Tensor, label: Tensor, matrices: np.ndarray, turned: np.ndarray, out_image: Tensor, out_label: Tensor
) -> None:
    """Fill the turned rows in place through torch's grid_sample, all rows in one call."""
    rows = torch.from_numpy(np.flatnonzero(turned)).to(image.device)
    patch = tuple(out_label.shape[1:])
    theta = _theta(matrices[turned], tuple(image.shape[2:]), patch).to(image.device, image.dtype)
    grid = F.affine_grid(theta, [len(rows), 1, *patch], align_corners=False)
    out_image[rows] = F.grid_sample(image[rows], grid, mode="bilinear", align_corners=False)
    hard = F.grid_sample(label[rows].unsqueeze(1).to(image.dtype), grid, mode="nearest", align_corners=False)
    out_label[rows] = hard.squeeze(1).to(label.dtype)


def centre_of_patch(size: np.ndarray, patch: np.ndarray) -> np.ndarray:
    """Index ``(3,)`` of the centre of a patch of ``patch (3,)`` voxels within the ``size (3,)`` that was read: the centre
    crop of an odd difference lies half a voxel off."""
    return np.asarray((size - patch) // 2 + (patch - 1) / 2)


def _theta(matrices: np.ndarray, source: tuple[int, ...], patch: tuple[int, ...]) -> Tensor:
    """``(R, 3, 4)`` for `torch.nn.functional.affine_grid`: from output to input, axes in order (W, H, D), in units in
    which a side runs from -1 to 1 between its outer voxel faces."""
    size, out = np.array(source, dtype=float), np.array(patch, dtype=float)
    unit = matrices * out[None, None, :] / size[None, :, None]
    offset = centre_of_patch(size, out) - (size - 1) / 2
    shift = np.broadcast_to(2 * offset / size, (len(matrices), 3))
    theta = np.concatenate([unit[:, ::-1, ::-1], shift[:, ::-1, None]], axis=2)
    return torch.from_numpy(np.ascontiguousarray(theta))


def voxel_matrices(params: Params, spacing: Triple) -> np.ndarray:
    """``(B, 3, 3)``: offset from the centre in output voxels (D, H, W) -> offset in input voxels.

    output -> mirrored -> mm -> turned back and scaled back -> voxels. Positive angles turn content from H to W
    (about D), from W to D (about H) and from D to H (about W).
    """
    mm = np.diag(spacing)
    out = []
    for angles, scale, flip in zip(params.rotation, params.scale, params.flip, strict=True):
        mirror = np.diag(np.where(flip, -1.0, 1.0))
        out.append(np.linalg.inv(mm) @ rotation_matrix(angles).T @ mm @ mirror / scale)
    return np.stack(out)


def rotation_matrix(angles: np.ndarray) -> np.ndarray:
    """Rotation in (D, H, W) coordinates by angles (radians) about D, then H, then W."""
    (cd, ch, cw), (sd, sh, sw) = np.cos(angles), np.sin(angles)
    about_d = np.array([[1, 0, 0], [0, cd, -sd], [0, sd, cd]])
    about_h = np.array([[ch, 0, sh], [0, 1, 0], [-sh, 0, ch]])
    about_w = np.array([[cw, -sw, 0], [sw, cw, 0], [0, 0, 1]])
    return np.asarray(about_w @ about_h @ about_d)
