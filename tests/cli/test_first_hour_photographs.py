"""The first hour again, from a terminal: real photographs in a folder, command after command, every message read."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from PIL import Image

COUNTS = (70, 40, 25, 15, 10, 6)
TEST_IMAGES = 15
NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog")


@pytest.fixture(scope="module")
def photos(shared, tmp_path_factory) -> Path:
    """Files of CIFAR-10, as they are kept: six classes with a long tail."""
    root = tmp_path_factory.mktemp("photographs") / "pets"
    with np.load(shared / "data" / "cifar10.npz") as packed:
        for split, most in (("train", COUNTS), ("test", (TEST_IMAGES,) * len(COUNTS))):
            content, labels = packed[f"{split}_bytes"].tobytes(), packed[f"{split}_labels"]
            ends = packed[f"{split}_ends"]
            starts = np.concatenate([[0], ends[:-1]])
            for label, name in enumerate(NAMES):
                (root / split / name).mkdir(parents=True)
                for place in np.flatnonzero(labels == label)[: most[label]]:
                    (root / split / name / f"{place}.webp").write_bytes(content[starts[place] : ends[place]])
    return root


@pytest.fixture(scope="module")
def say(photos):
    """`say(words)` runs a command where the folder lies: (what it prints, what it says), without line breaks."""

    def start(words: str) -> tuple[str, str]:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
            "LONGTAIL_CACHE": str(photos.parent / "c"),
        }
        command = [sys.executable, "-m", "longtail", *words.split()]
        done = subprocess.run(command, cwd=photos.parent, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
        return done.stdout, " ".join(done.stderr.split())

    return start


def test_from_a_folder_to_a_file_for_another_program(photos, say):
    out, said = say("distribution pets")
    assert "pets: 6 classes; images: 166 train (train/), 90 test (test/)" in out + said
    assert "imbalance factor 11.7" in out + said

    _, said = say("train pets --out=runs/pets --epochs=6 --workers=0 --batch-size=32")
    assert re.search(r"pets: 6 classes; images: 149 train \(train/\), 17 validation \(held out .*90 test", said)
    assert "colour, about 32 pixels. Trained with --backbone resnet8 --image-size 32 --augment crop flip" in said
    assert re.search(r"28 steps of 32 images: about \d+ s here", said)
    assert re.search(r"epoch 6/6 loss [\d.]+ validation: Top-1 [\d.]+, Balanced accuracy [\d.]+", said)

    out, said = say("diagnose runs/pets --workers=0")
    assert "17 validation samples" in out
    assert re.search(r"[Cc]alibrat", out + said)

    out, said = say("calibrate runs/pets --method=auto --workers=0")
    assert "runs/pets/auto" in out + said

    out, said = say("calibrate runs/pets --workers=0")
    assert "Balanced accuracy" in out
    assert "runs/pets/marc" in out + said

    _, said = say("report runs/pets --workers=0")
    assert "index.html" in said
    page = (photos.parent / "runs" / "pets" / "report" / "index.html").read_text(encoding="utf-8")
    assert "pets" in re.search(r"<title>(.*?)</title>", page)[1]

    out, _ = say("predict runs/pets/marc pets/test/dog --top=2 --json --workers=0")
    images = json.loads(out)["images"]
    assert len(images) == TEST_IMAGES
    assert {one["name"] for image in images for one in image["classes"]} <= set(NAMES)

    _, said = say("export runs/pets/marc --format=onnx --out=pets.onnx --with-preprocessing")
    assert "checked: its logits differ from torch's by at most" in said
    assert "resizing and normalisation are inside the network" in said
    session = onnxruntime.InferenceSession(photos.parent / "pets.onnx", providers=["CPUExecutionProvider"])
    picture = Image.open(
        images[0]["path"] if Path(images[0]["path"]).is_absolute() else photos.parent / images[0]["path"]
    )
    (logits,) = session.run(None, {"images": np.asarray(picture.convert("RGB"))[None]})
    assert NAMES[logits[0].argmax()] == images[0]["classes"][0]["name"]
