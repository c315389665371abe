"""A file with its preprocessing inside: pictures of any size in, the logits of the library out."""

import json

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

import longtail
from longtail.cli.main import main
from longtail.data.augment import Resize, ResizeCenterCrop
from longtail.exports.network import Preparation

SIZES = ((1, 1), (3, 200), (200, 3), (32, 32), (64, 64), (96, 192), (70, 50), (33, 31), (517, 389))  # height, width
NO_NUMBERS = np.zeros(0)


def pictures(height: int, width: int, count: int = 1) -> np.ndarray:
    random = np.random.default_rng(height + width)
    noise = random.integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    noise[:, : height // 2] = noise[:, : height // 2] // 128 * 255  # black and white, where rounding is hardest
    return noise


@pytest.mark.parametrize("decode", [Resize(32), ResizeCenterCrop(32), Resize(32, "bicubic")])
@pytest.mark.parametrize("size", SIZES)
def test_every_pixel_is_that_of_pillow(decode, size):
    given = pictures(*size)
    for channels, mode in ((3, "RGB"), (1, "L")):
        expected = np.asarray(decode(Image.fromarray(given[0]).convert(mode), NO_NUMBERS))
        found = Preparation(decode, channels)(torch.from_numpy(given))
        assert found.shape == (1, channels, 32, 32)
        levels = np.rint(found.numpy()[0] * 255).astype(np.uint8).transpose(1, 2, 0).squeeze()
        np.testing.assert_array_equal(levels, expected)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A run on colour photographs that are cut at the centre."""
    root = tmp_path_factory.mktemp("prepared")
    for label in range(3):
        (root / "photos" / f"class-{label}").mkdir(parents=True)
        for number in range(4):
            Image.fromarray(pictures(20 + label, 24 + number)[0]).save(
                root / "photos" / f"class-{label}" / f"{number}.png"
            )
    config = longtail.TrainConfig(
        data="folder", root=str(root / "photos"), backbone="resnet8", image_size=16, iterations=3, validation=0,
        augment=("resized-crop",), workers=0, device="cpu",
    )  # fmt: skip
    longtail.train(config, root / "run")
    return root / "run"


def test_onnx_takes_pictures_of_any_size(photos, tmp_path, capsys):
    out = tmp_path / "photos.onnx"
    words = ("export", photos, "--format=onnx", "--out", out, "--with-preprocessing", "--json")
    assert main([str(word) for word in words]) == 0
    assert json.loads(capsys.readouterr().out)["largest_difference"] < 1e-4
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    described = session.get_modelmeta().custom_metadata_map
    assert described["input"] == "images (N, H, W, 3), uint8, RGB, of any height and width"
    assert described["preprocessing"].endswith("resizing and normalisation are inside the network")
    assert session.get_inputs()[0].shape == ["batch", "height", "width", 3]
    model = longtail.load(photos, device="cpu")
    for size in SIZES:
        given = pictures(*size, count=2)
        (logits,) = session.run(None, {"images": given})
        expected = model.predict(given, progress=False).probabilities
        np.testing.assert_allclose(torch.from_numpy(logits).softmax(1), expected, atol=1e-5)


def test_a_torch_program_of_a_grey_run_takes_colour_pictures_of_any_size(digits_run, tmp_path):
    out = tmp_path / "digits.pt2"
    assert longtail.export(digits_run, out, "torch-export", with_preprocessing=True).largest_difference < 1e-4
    program, model = torch.export.load(out).module(), longtail.load(digits_run, device="cpu")
    for size in SIZES[:5]:
        given = pictures(*size)
        found = program(torch.from_numpy(given)).detach().softmax(1)
        np.testing.assert_allclose(found, model.predict(given, progress=False).probabilities, atol=1e-5)


@pytest.mark.parametrize("format", ["safetensors", "npz", "json"])
def test_only_files_with_a_network_hold_preprocessing(photos, tmp_path, format):
    with pytest.raises(longtail.UserError, match=f"into onnx and torch-export files, not into {format}"):
        longtail.export(photos, tmp_path / "out", format, with_preprocessing=True)
    assert list(tmp_path.iterdir()) == []
