import numpy as np
import pytest
import torch
from PIL import Image

from longtail.data import autoaugment
from longtail.data.augment import AUGMENTATIONS, build_transform, crop
from longtail.data.autoaugment import CIFAR_POLICY
from longtail.errors import UserError

PIXELS = torch.randint(1, 256, (64, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
NUMBERS = torch.rand(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def augmented(name, numbers=NUMBERS, pixels=PIXELS):
    columns, apply = AUGMENTATIONS[name]
    return apply(pixels, numbers[:, :columns])


def test_crop_is_a_window_of_the_padded_image():
    out = augmented("crop")
    padded = torch.nn.functional.pad(PIXELS, (4, 4, 4, 4))
    for i in range(64):
        top, left = (int(number * 9) for number in NUMBERS[i, :2])
        assert torch.equal(out[i], padded[i, :, top : top + 32, left : left + 32])


@pytest.mark.parametrize(("name", "dimension"), [("flip", 2), ("vertical-flip", 1)])
def test_flips_mirror_below_one_half(name, dimension):
    out = augmented(name)
    for i in range(64):
        assert torch.equal(out[i], PIXELS[i].flip(dimension) if NUMBERS[i, 0] < 0.5 else PIXELS[i])


@pytest.mark.parametrize(("side", "padding"), [(8, 1), (32, 4), (224, 28)])
def test_a_window_is_moved_by_an_eighth_of_the_side(side, padding):
    pixels = torch.ones(1, 1, side, side, dtype=torch.uint8)
    corner = crop(pixels, torch.tensor([[0.0, 0.5]]))
    assert corner[0, 0, :, side // 2].tolist() == [0] * padding + [1] * (side - padding)


def test_rotation_turns_as_pillow_does_by_up_to_fifteen_degrees():
    numbers = torch.linspace(0, 1, 64, dtype=torch.float64).view(-1, 1)
    out = augmented("rotate", numbers)
    for i in (0, 10, 31, 63):
        picture = Image.fromarray(PIXELS[i].permute(1, 2, 0).numpy())
        turned = np.asarray(picture.rotate(30 * numbers[i].item() - 15))
        np.testing.assert_array_equal(out[i].permute(1, 2, 0).numpy(), turned)
    assert torch.equal(augmented("rotate", torch.full((64, 1), 0.5)), PIXELS)


def test_quarter_turns_are_drawn_equally_often():
    out = augmented("quarter-turn")
    for i in range(64):
        assert torch.equal(out[i], PIXELS[i].rot90(int(NUMBERS[i, 0] * 4), (1, 2)))


def test_cutout_is_a_square_of_sixteen_cut_off_at_the_border():
    out = augmented("cutout")
    for i in range(64):
        expected = PIXELS[i].clone()
        y, x = (int(number * 32) for number in NUMBERS[i, :2])
        expected[:, max(y - 8, 0) : y + 8, max(x - 8, 0) : x + 8] = 0
        assert torch.equal(out[i], expected)


def test_jitter_in_the_middle_changes_nothing():
    assert torch.equal(augmented("jitter", torch.full((64, 3), 0.5)), PIXELS)
    assert not torch.equal(augmented("jitter", torch.full((64, 3), 0.9)), PIXELS)


def test_autoaugment_applies_the_drawn_pair_in_order():
    policy = next(i for i, pair in enumerate(CIFAR_POLICY) if pair[0][0] == "solarize" and pair[1][0] == "autocontrast")
    numbers = torch.tensor([[(policy + 0.5) / 25, 0.0, 0.9, 0.0, 0.9]], dtype=torch.float64)
    threshold = torch.tensor([256 - 256 * CIFAR_POLICY[policy][0][2] / 9])
    expected = autoaugment.autocontrast(autoaugment.solarize(PIXELS[:1], threshold), threshold)
    assert torch.equal(augmented("autoaugment", numbers, PIXELS[:1]), expected)
    neither = torch.tensor([[(policy + 0.5) / 25, 0.95, 0.9, 0.95, 0.9]], dtype=torch.float64)
    assert torch.equal(augmented("autoaugment", neither, PIXELS[:1]), PIXELS[:1])


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_an_image_is_augmented_the_same_way_in_any_batch(name):
    whole = augmented(name)
    parts = torch.cat([augmented(name, NUMBERS[i : i + 7], PIXELS[i : i + 7]) for i in range(0, 64, 7)])
    assert torch.equal(whole, parts)
    assert whole.dtype == torch.uint8
    assert whole.data_ptr() != PIXELS.data_ptr()


def test_numbers_depend_on_seed_and_draw_alone():
    transform = build_transform(["crop", "autoaugment", "cutout"], [0.5] * 3, [0.5] * 3, image_size=None, seed=5)
    whole = transform.numbers(np.arange(1000))
    assert whole.shape == (1000, 9)
    some = np.array([400, 401, 402, 7, 999, 998, 500, 500])
    np.testing.assert_array_equal(transform.numbers(some), whole[some])
    other = build_transform(["crop", "autoaugment", "cutout"], [0.5] * 3, [0.5] * 3, image_size=None, seed=6)
    assert (other.numbers(np.arange(1000)) != whole).all()
    assert whole.mean(0) == pytest.approx(0.5, abs=0.05)
    assert np.abs(np.corrcoef(whole.T) - np.eye(9)).max() < 0.12


def test_normalising_gives_mean_zero_and_unit_deviation():
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    out = build_transform([], mean, std, image_size=None).normalise(PIXELS)
    expected = (PIXELS.double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_unknown_augmentation_lists_the_known_ones():
    with pytest.raises(UserError, match="choose from: crop, .*resized-crop"):
        build_transform(["crp"], [0.5], [0.5], image_size=None, seed=0)
