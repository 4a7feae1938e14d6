"""The augmentation as a DALI graph over volumes, for the CPU or the GPU: same numbers in, same function as in torch.

Every parameter comes from `segspeed.augment.draw`; the graph draws nothing itself, so it has no random state to save.
A transform that a sample did not draw is not executed for it (conditional execution).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segspeed.types import Shape3

# What the source hands over for each sample, in this order. C channels; volumes are (D, H, W, C).
INPUTS = (
    "image", "label", "norm", "number", "turned", "matrix", "flip", "noise_on", "noise",
    "blur", "brightness", "contrast", "zoom", "gamma", "sign",
)  # fmt: skip


def build_pipeline(
    source: Callable[..., Any],
    *,
    batch: int,
    channels: int,
    patch: Shape3,
    start: Shape3,
    workers: int,
    threads: int,
    prefetch: int,
    device_id: int | None,
) -> Any:
    """A built pipeline whose outputs are image ``(C, D, H, W)``, label ``(D, H, W)`` and case number a sample.

    ``start`` is where the patch lies in what the source reads. ``device_id`` None runs everything on the CPU.
    """
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali import math as dmath

    linear, nearest = types.INTERP_LINEAR, types.INTERP_NN
    size = list(patch)

    def contrast(x: Any, factor: Any) -> Any:
        mean = fn.reductions.mean(x)
        return dmath.clamp((x - mean) * factor + mean, fn.reductions.min(x), fn.reductions.max(x))

    def low_resolution(x: Any, small: Any) -> Any:
        reduced = fn.resize(x, size=small, interp_type=nearest, antialias=False)
        return fn.resize(reduced, size=size, interp_type=linear, antialias=False)

    def gamma(x: Any, exponent: Any, sign: Any) -> Any:
        x = x * sign
        mean, std = fn.reductions.mean(x), dmath.sqrt(fn.reductions.variance(x, fn.reductions.mean(x)))
        low = fn.reductions.min(x)
        span = dmath.max(fn.reductions.max(x) - low, 1e-7)
        y = dmath.fpow((x - low) / span, exponent)
        middle = fn.reductions.mean(y)
        spread = dmath.max(dmath.sqrt(fn.reductions.variance(y, middle)), 1e-7)
        return ((y - middle) * (std / spread) + mean) * sign

    @pipeline_def(
        batch_size=batch,
        num_threads=threads,
        device_id=device_id,
        prefetch_queue_depth=prefetch,
        py_num_workers=max(workers, 1),
        py_start_method="fork" if device_id is None else "spawn",  # a forked process cannot use a CUDA context
        enable_conditionals=True,
    )
    def graph() -> Any:
        values = fn.external_source(source=source, num_outputs=len(INPUTS), batch=False, parallel=workers > 0)
        given = {name: values[place] for place, name in enumerate(INPUTS)}
        image = fn.reshape(given["image"], layout="DHWC")
        label = fn.reshape(given["label"], layout="DHWC")
        noise = given["noise"]
        if device_id is not None:
            image, label, noise = image.gpu(), label.gpu(), noise.gpu()
        norm = given["norm"]  # (4, C): low, high, mean, std
        image = (dmath.clamp(image, norm[0], norm[1]) - norm[2]) / norm[3]
        if given["turned"]:
            image = fn.warp_affine(image, matrix=given["matrix"], size=size, interp_type=linear, fill_value=0.0)
            label = fn.warp_affine(label, matrix=given["matrix"], size=size, interp_type=nearest, fill_value=0.0)
        else:
            image = fn.slice(image, start=list(start), shape=size, axes=[0, 1, 2])
            label = fn.slice(label, start=list(start), shape=size, axes=[0, 1, 2])
            if given["flip"][3]:
                over = {"depthwise": given["flip"][0], "vertical": given["flip"][1], "horizontal": given["flip"][2]}
                image, label = fn.flip(image, **over), fn.flip(label, **over)
        if given["noise_on"]:
            image = image + noise
        parts = []
        for c in range(channels):
            x = image[:, :, :, c : c + 1] if channels > 1 else image
            if given["blur"][c, 0] > 0:
                x = fn.gaussian_blur(
                    x, sigma=given["blur"][c, 0], window_size=fn.cast(given["blur"][c, 1], dtype=types.INT32)
                )
            if given["brightness"][c] != 1:
                x = x * given["brightness"][c]
            if given["contrast"][c] != 1:
                x = contrast(x, given["contrast"][c])
            if given["zoom"][c, 0] > 0:
                x = low_resolution(x, given["zoom"][c])
            if given["gamma"] != 1:
                x = gamma(x, given["gamma"], given["sign"])
            parts.append(x)
        image = fn.cat(*parts, axis=3) if channels > 1 else parts[0]
        image = fn.transpose(fn.reshape(image, layout=""), perm=[3, 0, 1, 2])
        label = fn.squeeze(fn.reshape(label, layout=""), axes=[3])
        return image, label, given["number"]

    pipeline = graph()
    if workers > 0:
        pipeline.start_py_workers()
    pipeline.build()
    return pipeline
