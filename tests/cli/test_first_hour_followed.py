"""The first hour of someone who types what the last command has named: a folder unlike those of the documentation."""

import re
import shlex
from pathlib import Path

import numpy as np
from PIL import Image

import longtail
from longtail.cli.main import main

COUNTS = {"Köln & Bonn": 60, "two words": 28, "-dash": 12, "100 %": 7, "ñandú (young)": 3, "lone": 1}
QUICK = {"train": ["--epochs", "12", "--workers", "0"], "distribution": []}


def write_folder(root):
    """Scans of several sizes and modes, a folder per class without splits, and files that are no images."""
    rng, digits = np.random.default_rng(0), longtail.data.open_splits("digits-lt").split("test")
    for label, (name, count) in enumerate(COUNTS.items()):
        (root / name).mkdir(parents=True)
        for place in np.flatnonzero(digits.labels.numpy() == label)[:count]:
            picture = Image.fromarray(digits.pixels[place, 0].numpy())
            sized = picture.resize(tuple(rng.integers(10, 40, 2).tolist()))
            sized.convert("RGB" if place % 2 else "L").save(root / name / f"Scan {place}.JPG", quality=95)
    (root / "two words" / "Thumbs.db").write_bytes(b"\0")
    (root / "notes.txt").write_text("bought in May")


def test_every_command_names_the_next_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "My scans, 2026")
    words, typed, printed = ["distribution", "My scans, 2026"], [], ""
    while "--serve" not in words:
        typed.append(words[0])
        assert len(typed) < 9, typed
        capsys.readouterr()
        assert main([*words, *QUICK.get(words[0], ["--workers", "0"])]) == 0
        printed = capsys.readouterr()
        commands = re.findall(r"^next: longtail (.*?)(?:  \(.*)?$", printed.err, re.MULTILINE)
        assert len(commands) == 1, printed.err  # one next step, not a choice
        words = shlex.split(commands[0])
        if typed[-1] == "diagnose":  # so few images settle nothing: what would, and what is safe, in one line
            assert re.search(r"clear from about [\d,]+ images on|too little to measure", " ".join(printed.out.split()))
            assert words[-2:] == ["--most-loss", "1"]
    assert typed == ["distribution", "train", "diagnose", "calibrate", "report"]
    (page,) = re.findall(r"written: (.*\.html) ", printed.err)
    assert Path(page).is_file()
    assert words == ["report", "runs/My scans, 2026", "--serve"]
    capsys.readouterr()
    assert main(["evaluate", "runs/My scans, 2026/halo", "--workers", "0"]) == 0
    assert "fitted or chosen on the validation images: its scores there are higher" in capsys.readouterr().err


def test_saved_logits_lead_to_a_calibration_and_a_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name, counts in {"train": [300, 60, 12], "my val": [60, 30, 20], "test": [40, 40, 40]}.items():
        labels = np.repeat(np.arange(3), counts)
        np.savez(name, logits=3 * np.eye(3)[labels] + rng.normal(size=(len(labels), 3)) + [2, 0, -2], labels=labels)

    def following(*words):
        capsys.readouterr()
        assert main(list(words)) == 0
        (command,) = re.findall(r"^next: longtail (.*)$", capsys.readouterr().err, re.MULTILINE)
        return shlex.split(command)

    calibrate = following("diagnose", "my val.npz", "--train", "train.npz")
    assert calibrate[:4] == ["calibrate", "train.npz", "--validation", "my val.npz"]
    assert main(calibrate) == 0
    report = following("calibrate", "train.npz", "--validation", "my val.npz", "--test", "test.npz", "--out", "out")
    assert report[:4] == ["report", "train.npz", "--validation", "my val.npz"]
    assert main(report) == 0
    assert Path("report/index.html").is_file()
