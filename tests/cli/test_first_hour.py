"""The first hour of a newcomer: a folder of images of their own, every message read."""

import csv
import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from PIL import Image

import longtail
from longtail.cli.main import main
from longtail.data.images import FileImages

COUNTS = (60, 30, 12, 5)  # training images of zeros, ones, twos and threes
NAMES = ("zero", "one", "two", "three")


def run(capsys, *words) -> tuple[int, str, str]:
    capsys.readouterr()
    try:
        code = main([str(word) for word in words])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, " ".join(captured.err.split())


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Real handwritten digits as small PNG files, in Train/ and Testing/, a folder per class."""
    root = tmp_path_factory.mktemp("hour") / "photos"
    splits = longtail.data.open_splits(longtail.TrainConfig(data="digits", backbone="digits", epochs=1))
    for folder, images, most in (("Train", splits.train, COUNTS), ("Testing", splits.test, (20,) * 4)):
        for label, name in enumerate(NAMES):
            (root / folder / name).mkdir(parents=True)
            for place in np.flatnonzero(images.labels.numpy() == label)[: most[label]]:
                picture = Image.fromarray(images.pixels[place, 0].numpy())
                picture.resize((9 + label, 10)).save(root / folder / name / f"{place:04d}.png")
    return root


@pytest.fixture(scope="module")
def trained(photos) -> Path:
    folder = photos.parent / "runs" / "photos"
    words = ("train", photos, f"--out={folder}", "--epochs=12", "--workers=0", "--device=cpu", "--quiet")
    assert main([str(word) for word in words]) == 0
    assert main(["calibrate", str(folder), "--method=marc", "--device=cpu", "--workers=0", "--quiet"]) == 0
    return folder


def test_a_folder_is_trained_and_everything_chosen_is_said(capsys, photos, tmp_path):
    code, _, said = run(capsys, "train", photos, "--out", tmp_path / "run", "--epochs=1", "--workers=0")
    assert code == 0
    sizes = re.search(r"photos: 4 classes; images: (\d+) train \(Train/\), (\d+) validation \(held out .*80 test", said)
    assert sizes
    assert int(sizes[1]) + int(sizes[2]) == sum(COUNTS)
    assert "grey, about 9 pixels. Trained with --backbone digits --image-size 8 --augment small-crop --epochs 1" in said
    assert "give any of these options to change it" in said
    assert "steps of 64 images: about" in said
    assert longtail.Run.open(tmp_path / "run").config.backbone == "digits"


def test_a_broken_image_is_named_before_anything_is_written(capsys, photos, tmp_path):
    shutil.copytree(photos, tmp_path / "photos")
    (tmp_path / "photos" / "Train" / "two" / "0000.png").write_bytes(b"no picture")
    words = ("train", tmp_path / "photos", "--out", tmp_path / "run", "--epochs=1", "--workers=2", "--device=cpu")
    code, _, said = run(capsys, *words)
    assert code == 2
    assert "0000.png cannot be read" in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()
    assert run(capsys, *words, "--skip-broken")[0] == 0


def test_a_run_is_not_replaced_unless_asked(capsys, photos, tmp_path):
    words = ("train", photos, "--out", tmp_path / "run", "--epochs=1", "--workers=0", "--device=cpu")
    assert run(capsys, *words)[0] == 0
    for more in ((), ("--minutes=1",)):
        code, _, said = run(capsys, *words, *more)
        assert code == 2
        assert "run already; continue with --resume, replace it with --overwrite or choose another --out" in said
        assert " here" not in said  # before any trial
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    code, _, said = run(capsys, *words, "--overwrite")
    assert code == 2
    assert "holds more than a run (thesis.txt), so it is not replaced" in said
    (tmp_path / "run" / "thesis.txt").unlink()
    assert run(capsys, *words, "--overwrite", "--seed=3")[0] == 0
    assert longtail.Run.open(tmp_path / "run").config.seed == 3


def test_a_run_inside_the_images_would_become_a_class(capsys, photos):
    code, _, said = run(capsys, "train", photos, "--out", photos / "run", "--epochs=1")
    assert code == 2
    assert "is inside the images of" in said
    assert not (photos / "run").exists()


def test_predictions_are_those_that_evaluation_counts(capsys, photos, trained):
    model = trained / "marc"
    code, out, _ = run(capsys, "predict", model, photos / "Testing", "--json", "--device=cpu", "--workers=0")
    assert code == 0
    images = json.loads(out)["images"]
    right = [image["classes"][0]["name"] == Path(image["path"]).parent.name for image in images]
    assert run(capsys, "evaluate", model, "--device=cpu", "--workers=0")[0] == 0
    scores = json.loads((model / "metrics-test.json").read_text())
    assert len(images) == 80
    assert np.mean(right) == pytest.approx(scores["top1"])
    assert np.mean(right) > 0.5  # it has learnt something, or the names would mean nothing
    sums = [sum(known["probability"] for known in image["classes"]) for image in images]
    assert all(len(image["classes"]) == 3 for image in images)
    assert max(sums) <= 1 + 1e-6


def test_every_way_to_name_images_gives_the_same(capsys, photos, trained, tmp_path):
    files = sorted((photos / "Testing" / "one").glob("*.png"))[:5]
    (tmp_path / "list.txt").write_text("".join(f"{file.relative_to(photos)} 1\n" for file in files))
    (tmp_path / "table.csv").write_text("id,path\n" + "".join(f"7,{file.relative_to(photos)}\n" for file in files))
    expected = longtail.load(trained, device="cpu").predict(files, progress=False)
    assert expected.probabilities.shape == (5, 4)
    for name in ("list.txt", "table.csv"):
        words = ("predict", trained, tmp_path / name, "--root", photos, "--out", tmp_path / f"{name}.out", "--top=9")
        code, _, said = run(capsys, *words, "--workers=0")
        assert code == 0
        assert "(5 images)" in said
        rows = list(csv.DictReader((tmp_path / f"{name}.out").read_text().splitlines()))
        assert [row["class_1"] for row in rows] == expected.names
        assert [float(row["probability_1"]) for row in rows] == pytest.approx(expected.probabilities.max(1), abs=1e-5)
        assert "class_4" in rows[0]
        assert "class_5" not in rows[0]
        code, _, said = run(capsys, *words)
        assert code == 2
        assert "exists already" in said


def test_pictures_arrays_and_paths_are_one_to_python(photos, trained):
    model = longtail.load(str(trained), device="cpu")
    files = [sorted((photos / "Testing" / name).glob("*.png"))[0] for name in NAMES]
    expected = model.predict([str(file) for file in files], progress=False).probabilities
    pictures = [Image.open(file) for file in files]
    arrays = [np.asarray(picture) for picture in pictures]
    colour = [np.asarray(picture.convert("RGB")) for picture in pictures]
    for images in (pictures, arrays, colour):
        np.testing.assert_allclose(model.predict(images, progress=False).probabilities, expected, atol=1e-6)
    np.testing.assert_allclose(model.predict(arrays[2], progress=False).probabilities[0], expected[2], atol=1e-6)
    with pytest.raises(longtail.UserError, match=r"image 0 is an array .* of float64; give pixels from 0 to 255"):
        model.predict([arrays[0] / 255], progress=False)
    with pytest.raises(longtail.UserError, match=r"give either paths or pictures, not both: .*png' is a path"):
        model.predict([pictures[0], files[0]], progress=False)
    with pytest.raises(longtail.UserError, match="no images"):
        model.predict([])
    assert repr(model) == f"Predictor('{trained}': digits, {len(NAMES)} classes)"
    assert "calibrated with MARC" in repr(longtail.load(trained / "marc", device="cpu"))


def test_new_images_of_a_grey_data_set_may_be_of_any_size_and_colour(tmp_path):
    longtail.train(longtail.TrainConfig(data="digits", backbone="digits", iterations=2, device="cpu"), tmp_path / "run")
    rng = np.random.default_rng(0)
    large = [Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)) for _ in range(3)]
    by_hand = [np.asarray(picture.convert("L").resize((8, 8), Image.Resampling.BILINEAR)) for picture in large]
    model = longtail.load(tmp_path / "run", device="cpu")
    found = model.predict(large, progress=False).probabilities
    assert found.shape == (3, 10)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(found, model.predict(by_hand, progress=False).probabilities, atol=1e-6)
    assert np.abs(found[0] - found[1]).max() > 1e-5  # it is not blind


def test_an_exported_file_says_how_pictures_are_prepared(capsys, photos, trained, tmp_path):
    code, _, said = run(capsys, "export", trained / "marc", "--format=onnx", "--out", tmp_path / "model.onnx")
    assert code == 0
    prepared = "convert to RGB; resize the whole image to 8 x 8, whatever its shape (bilinear, antialiased, as Pillow"
    assert prepared in said
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert prepared in session.get_modelmeta().custom_metadata_map["preprocessing"]
    file = sorted((photos / "Testing" / "three").glob("*.png"))[0]
    square = Image.open(file).convert("RGB").resize((8, 8), Image.Resampling.BILINEAR)
    pixels = np.asarray(square, dtype=np.float32).transpose(2, 0, 1)[None] / 255
    (logits,) = session.run(None, {"images": pixels})
    by_hand = np.exp(logits[0]) / np.exp(logits[0]).sum()
    found = longtail.load(trained / "marc", device="cpu").predict(file, progress=False)
    np.testing.assert_allclose(found.probabilities[0], by_hand, atol=1e-4)


def test_every_class_is_shown_if_asked(capsys, trained, monkeypatch):
    monkeypatch.setattr("longtail.report.terminal.SHOWN_CLASSES", 2)
    _, out, _ = run(capsys, "evaluate", trained, "--device=cpu", "--workers=0")
    assert "--all shows every class" in out
    assert " test images " in out  # which images were scored
    assert "│ one " not in out
    _, out, _ = run(capsys, "evaluate", trained, "--device=cpu", "--workers=0", "--all")
    assert all(f"│ {name} " in out for name in NAMES)


def test_a_report_without_its_extra_is_refused_at_the_start(capsys, trained, tmp_path, monkeypatch):
    monkeypatch.setattr("longtail.report.find_spec", lambda name: None if name == "plotly" else name)
    monkeypatch.setattr("longtail.runs.folder.stored_outputs", None)  # nothing is computed before
    code, _, said = run(capsys, "report", trained, "--out", tmp_path / "report")
    assert code == 2
    assert "pip install 'longtail[report]'" in said
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "there are no images to predict; give image files, folders, or a list of files"),
        (["nowhere.png"], "nowhere.png does not exist"),
        (["{empty}"], "no images below"),
        (["{broken}"], "broken.png cannot be read"),
        (["{broken}", "--top=0"], "--top must be positive"),
    ],
)
def test_images_that_are_none(capsys, trained, tmp_path, paths, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.png").write_bytes(b"no picture")
    known = {"empty": tmp_path / "empty", "broken": tmp_path / "broken.png"}
    code, _, said = run(capsys, "predict", trained, *(path.format(**known) for path in paths))
    assert code == 2
    assert message in said


def test_images_that_cannot_be_read_are_left_out_if_asked(capsys, photos, trained, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    good = sorted((photos / "Testing" / "one").glob("*.png"))[0]
    code, out, said = run(capsys, "predict", trained, tmp_path / "broken.png", good, "--skip-broken", "--workers=0")
    assert code == 0
    assert "skipped, because it cannot be read" in said
    assert "1 images" in out


def test_images_are_decoded_once_for_all_commands(photos, trained, monkeypatch):
    monkeypatch.setattr(FileImages, "open", None)  # training and calibration have decoded all there are
    assert main(["evaluate", str(trained), "--device=cpu", "--workers=0", "--quiet"]) == 0


def test_a_suggested_command_names_the_folder_that_the_images_have_moved_to(capsys, photos, tmp_path):
    old, new, folder = tmp_path / "photos", tmp_path / "moved photos", tmp_path / "run"
    shutil.copytree(photos, old)
    assert run(capsys, "train", old, "--out", folder, "--epochs=1", "--workers=0", "--quiet")[0] == 0
    old.rename(new)
    code, _, said = run(capsys, "calibrate", folder, "--root", new, "--method=halo", "--workers=0")
    assert code == 0
    suggested = re.search(r"next: (longtail report .*)", said)[1]
    code, _, said = run(capsys, *shlex.split(suggested)[1:], "--workers=0")
    assert code == 0, said
    code, _, said = run(capsys, "report", folder, "--root", new, "--workers=0")
    assert code == 0
    page = (folder / "report" / "index.html").read_text()
    command = f"longtail calibrate {shlex.quote(str(folder))} --root {shlex.quote(str(new))} --method halo"
    assert json.dumps(command)[1:-1] in page.replace("\\u0027", "'")
