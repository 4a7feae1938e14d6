import numpy as np
import pytest
from PIL import Image

from segspeed.data import thumbnail
from segspeed.data.thumbnail import COLOURS, GREYS, HEIGHT, WIDTH, draw, outline, panel_sizes, save_thumbnail, slices
from segspeed.record import figures


def noise(shape, seed=0):
    return np.random.default_rng(seed).normal(100, 20, shape).astype(np.float32)


def test_classes_have_their_colours_of_every_other_picture():
    assert COLOURS == figures.COLOURS


def test_an_outline_by_hand():
    classes = np.array(
        [
            [0, 0, 0, 0, 0, 0],
            [0, 1, 1, 1, 2, 0],
            [0, 1, 1, 1, 2, 0],
            [0, 1, 1, 1, 2, 3],
            [0, 0, 0, 0, 0, 3],
        ]
    )
    expected = np.array(
        [
            [0, 0, 0, 0, 0, 0],
            [0, 1, 1, 1, 1, 0],
            [0, 1, 0, 1, 1, 0],  # only the middle of class 1 has no other neighbour
            [0, 1, 1, 1, 1, 1],
            [0, 0, 0, 0, 0, 1],
        ],
        bool,
    )
    np.testing.assert_array_equal(outline(classes), expected)
    np.testing.assert_array_equal(outline(np.ones((3, 3), int)), [[1, 1, 1], [1, 0, 1], [1, 1, 1]])


def test_contours_lie_where_the_label_lies():
    """A cube of 32 voxels fills squares of one size, so a voxel's place on the picture is known."""
    image = noise((32, 32, 32))
    label = np.zeros(image.shape, np.uint8)
    label[16:24, 8:24, 4:28] = 1  # D upper half, H middle, W nearly all
    sizes = panel_sizes(image.shape, (1, 1, 1))
    assert len(set(sizes)) == 1
    side = sizes[0][0]
    picture = draw(image, label, (1, 1, 1))
    rows, columns = np.nonzero(picture == GREYS)
    left = (WIDTH - 3 * side - 2 * thumbnail.GAP) // 2
    top = (HEIGHT - side) // 2
    scale = side / 32
    axial = columns < left + side
    assert columns[axial].min() == pytest.approx(left + 4 * scale, abs=1)
    assert columns[axial].max() == pytest.approx(left + 28 * scale - 1, abs=1)
    coronal = (columns >= left + side + thumbnail.GAP) & (columns < left + 2 * side + thumbnail.GAP)
    # the upper half in space is the upper half of the picture: D from 16 to 24 of 32, counted from below
    assert rows[coronal].min() == pytest.approx(top + side - 24 * scale, abs=1)
    assert rows[coronal].max() == pytest.approx(top + side - 16 * scale - 1, abs=1)


def test_left_and_right_front_and_back_are_not_mirrored():
    image = np.zeros((9, 9, 9), np.float32)
    image[:, 6:, 6:] = 100.0  # right and in front
    side = panel_sizes(image.shape, (1, 1, 1))[0][0]
    left = (WIDTH - 3 * side - 2 * thumbnail.GAP) // 2
    axial = draw(image, None, (1, 1, 1))[(HEIGHT - side) // 2 :, left : left + side]
    assert axial[5, side - 5] == GREYS - 1, "up and on the right of the axial slice"
    assert axial[5, 5] == axial[side - 5, side - 5] == 0


@pytest.mark.parametrize(
    ("shape", "spacing"),
    [((10, 20, 30), (3.0, 1.0, 1.0)), ((300, 512, 512), (2.0, 0.8, 0.8)), ((20, 100, 90), (5.0, 0.7, 0.7))],
)
def test_pixels_are_square_in_mm(shape, spacing):
    d, h, w = (n * s for n, s in zip(shape, spacing, strict=True))
    sizes = panel_sizes(shape, spacing)
    scales = [
        pixels / mm
        for size, plane in zip(sizes, ((h, w), (d, w), (d, h)), strict=True)
        for pixels, mm in zip(size, plane, strict=True)
    ]
    assert max(scales) / min(scales) < 1.05, "one scale for all, to the rounding of a pixel"
    assert sum(width for _, width in sizes) + 2 * thumbnail.GAP <= WIDTH
    fills = (
        max(height for height, _ in sizes) == HEIGHT,
        sum(width for _, width in sizes) + 2 * thumbnail.GAP > WIDTH - 6,
    )
    assert any(fills), "as large as fits"


def test_slices_go_through_the_centre_of_mass():
    label = np.zeros((20, 30, 40), np.uint8)
    label[4:7, 10:13, 20:23] = 2
    assert slices(label) == (5, 11, 21)
    assert slices(np.zeros_like(label)) is None


def test_a_slice_between_two_organs_moves_to_one_of_them():
    label = np.zeros((9, 9, 41), np.uint8)
    label[4, 4, 3:6] = 1
    label[4, 4, 35:38] = 1
    assert slices(label)[2] in (5, 35)


def test_a_lesion_between_the_samples_is_found():
    label = np.zeros((8, 400, 400), np.uint8)
    label[3, 1, 399] = 1
    assert slices(label) == (3, 1, 399)


def test_the_window_by_hand():
    image = np.zeros((10, 10, 10), np.float32)
    image[5:] = np.linspace(0, 1000, 500).reshape(5, 10, 10)
    label = np.zeros(image.shape, np.uint8)
    low, high = thumbnail.window(image, label)
    assert (low, high) == tuple(np.percentile(image, (1, 99)))
    image[2], label[2] = 400.0, 1
    image[1] = 200.0  # beside the structure; planes 1 to 3 are its box and as much again, and 0 is air
    near = np.concatenate([image[1].ravel(), image[2].ravel()])
    low, high = np.percentile(near, (1, 99.5))
    assert thumbnail.window(image, label) == (low - 0.15 * (high - low), high + 0.15 * (high - low))


def test_every_class_of_a_slice_is_seen_however_small():
    image = noise((3, 600, 600))
    label = np.zeros(image.shape, np.uint8)
    label[1, 100:400, 100:400] = 1
    label[1, 301, 250] = 2
    picture = draw(image, label, (5.0, 0.5, 0.5))
    assert (picture == GREYS + 1).any()


@pytest.mark.parametrize(
    "image",
    [
        np.full((6, 6, 6), np.nan, np.float32),
        np.zeros((6, 6, 6), np.float32),
        np.where(np.arange(216).reshape(6, 6, 6) % 7, np.float32(3), np.float32(np.inf)),
        np.float32([-3e38, 3e38]).repeat(108).reshape(6, 6, 6),
        np.arange(64, dtype=np.float32).reshape(1, 1, 64),
        np.ones((1, 1, 1), np.float32),
        np.ones((2000, 2, 2), np.float32),
    ],
    ids=["nan", "constant", "infinite", "huge values", "line", "one voxel", "needle"],
)
def test_whatever_the_voxels_there_is_a_picture(tmp_path, image, recwarn):
    save_thumbnail(tmp_path / "x.png", image, np.ones(image.shape, np.uint8), (1.0, 1.0, 1.0))
    with Image.open(tmp_path / "x.png") as picture:
        assert picture.size == (WIDTH, HEIGHT)
    assert not list(recwarn)


def test_a_label_of_another_shape_is_left_out():
    image = noise((8, 9, 10))
    other = np.ones((8, 9, 11), np.uint8)
    np.testing.assert_array_equal(draw(image, other, (1, 1, 1)), draw(image, None, (1, 1, 1)))


def test_the_file_is_small_whole_and_always_the_same(tmp_path):
    image = noise((40, 50, 60))
    label = np.zeros(image.shape, np.uint8)
    label[10:30, 10:30, 10:30] = 1
    for name in ("a", "b"):
        save_thumbnail(tmp_path / "new" / f"{name}.png", image, label, (1.0, 1.0, 1.0))
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["a.png", "b.png"]
    data = (tmp_path / "new" / "a.png").read_bytes()
    assert data == (tmp_path / "new" / "b.png").read_bytes()
    assert len(data) < 20_000, "pure noise, the worst case"
    with Image.open(tmp_path / "new" / "a.png") as picture:
        colours = {c for _, c in picture.convert("RGB").getcolors(100_000)}
    assert tuple(int(COLOURS[0][i : i + 2], 16) for i in (1, 3, 5)) in colours


def test_a_large_volume_is_not_copied():
    """These arrays would take 256 GB: their voxels share one place in memory."""
    shape = (4000, 4000, 4000)
    image = np.broadcast_to(np.float32(1), shape)
    assert draw(image, np.broadcast_to(np.uint8(1), shape), (1.0, 1.0, 1.0)).shape == (HEIGHT, WIDTH)


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        save_thumbnail(tmp_path / "file" / "x.png", noise((4, 4, 4)), None, (1.0, 1.0, 1.0))
