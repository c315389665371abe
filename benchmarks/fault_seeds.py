"""Small valid files for every reader, the readers, and words for the command line: what fuzzing starts from."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

COMMANDS = (
    ("train", "digits-lt", "--epochs", "1", "--lr", "0.1", "--seed", "0"),
    ("calibrate", "missing", "--method", "marc", "--options", "gamma", "1"),
    ("extract", "missing", "--views", "1"),
    ("compare", "digits-lt", "--methods", "softmax", "--seeds", "0"),
    ("evaluate", "missing", "--split", "test"),
    ("report", "missing", "--workers", "0"),
    ("predict", "missing", "missing.png", "--top", "1"),
    ("export", "missing", "--format", "onnx"),
    ("diagnose", "missing"),
    ("methods",),
    ("distribution", "missing"),
)
# Nothing that such a command is given exists, and --out is never given: nothing is written.
WORDS = ("--help", "--seed", "-1", "nan", "inf", "1e999", "", "\0", "--epochs=", "--lr=nan", "é", "\udcff", "--", "-")
WORDS += ("--method", "--methods", "--views", "--options", "a", "--top=-1", "9" * 40, "--quiet", "--json", "--format")
WORDS += ("--no-such-option", "--workers=-5", "--split", "../../x", "[bold]", "--root", "/dev/null/x", "--imbalance=0")


def valid_files(work: Path) -> dict[str, bytes]:
    """Name → content; the ending of the name decides the reader."""
    import torch
    from PIL import Image

    from longtail.files.atomic import write_json
    from longtail.files.tensors import write_tensors
    from longtail.outputs.record import Outputs

    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(12, 3)).astype(np.float32), np.arange(12) % 3
    found: dict[str, bytes] = {}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, logits=logits, labels=labels, class_names=np.array(["a", "b", "c"]))
    found["logits.npz"] = buffer.getvalue()
    buffer = io.BytesIO()
    np.save(buffer, logits)
    found["logits.npy"] = buffer.getvalue()
    found["logits.csv"] = b"label,a,b,c\n" + b"".join(
        f"{label},{row[0]},{row[1]},{row[2]}\n".encode() for label, row in zip(labels, logits, strict=True)
    )
    Outputs(labels, np.array([4, 4, 4]), logits=logits, class_names=("a", "b", "c")).save(work / "o.safetensors")
    found["outputs.safetensors"] = (work / "o.safetensors").read_bytes()
    weights = {"fc.weight": torch.zeros(3, 2), "fc.bias": torch.zeros(3, dtype=torch.bfloat16)}
    write_tensors(work / "w.safetensors", weights, {"format": 1, "model": "x", "step": 3})
    found["weights.safetensors"] = (work / "w.safetensors").read_bytes()
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    found["weights.pth"] = buffer.getvalue()
    found["list.txt"] = b"a/b.png 0\nc d.png 1\ne.png 2\n"
    found["images.csv"] = b"path,label,split\na.png,cat,train\nb.png,dog,train\nc.png,cat,test\n"
    found["prior.csv"] = b"class,weight\na,1\nb,2\nc,0.5\n"
    found["settings.toml"] = b'backbone = "digits"\nepochs = 3\nlr = 0.1\naugment = ["crop"]\noptions = {tau = "1"}\n'
    found["metrics.jsonl"] = b'{"step": 3, "images": 24, "loss": 1.5, "validation": {"top1": 0.5}}\n' * 3
    batch = {b"data": np.arange(6144, dtype=np.uint8).reshape(2, 3072), b"labels": [0, 1], b"batch_label": b"x"}
    found["cifar"] = pickle.dumps(batch, protocol=2)
    found["cifar4"] = pickle.dumps({"label_names": ["a", "b"], "data": batch[b"data"]}, protocol=4)
    for name, value in _records(work).items():
        write_json(work / name, value)
        found[name] = (work / name).read_bytes()
    pixels = rng.integers(0, 255, (9, 7, 3), np.uint8)
    for kind in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM"):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, kind)
        found[f"picture.{kind.lower()}"] = buffer.getvalue()
    with_table(found)
    return found


def with_table(found: dict[str, bytes]) -> None:
    """A Parquet file, where pyarrow is installed."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        return
    details = {"info": {"features": {"label": {"names": ["a", "b"]}}}}
    table = pa.table({"image": [b"x", b"y"], "label": [0, 1]})
    table = table.replace_schema_metadata({b"huggingface": json.dumps(details).encode()})
    buffer = io.BytesIO()
    parquet.write_table(table, buffer)
    found["table.parquet"] = buffer.getvalue()
    buffer = io.BytesIO()
    parquet.write_table(pa.table({"image": [b"x", b"y", b"z"], "label": ["cat", "dog", None]}), buffer)
    found["words.parquet"] = buffer.getvalue()


def _records(work: Path) -> dict[str, Any]:
    counts = {"class_names": ["a", "b"], "class_counts": [5, 3], "group_counts": [5, 3]}
    splits = {"train": {"images": 8, "digest": "x"}, "test": {"images": 4, "digest": None}}
    data = {"name": "x", "channels": 3, **counts, "splits": splits, "validation_from_training": True}
    origin = {"method": "marc", "title": "MARC", "head": "Linear", "run": "x", "model": "y"}
    run = {"config": {"backbone": "digits", "epochs": 1}, "data": data, "versions": {"python": "3"}, "format": 1}
    fitted = {"split": "train", "seen": True, "views": 1, "samples": 8, "model": "m", "digest": "d"}
    calibration = {"method": "marc", "title": "MARC", "paper": "p", "settings": {"gamma": 1}, "chosen": {"gamma": 1.0}}
    calibration |= {"parameters": 4, "fitted_on": fitted, "result": {}, "class_names": ["a", "b"], "model": "m"}
    calibration |= {"format": 1, "scale_": [1.0, 1.1], "shift_": [0.0, None]}
    return {"run.json": {**run, "calibration": origin}, "calibration.json": calibration}


Reader = Callable[[Path], Any]


def readers_of(work: Path) -> list[tuple[Reader, tuple[str, ...]]]:
    """Every reader with the files it starts from."""
    from longtail.backbones.weights import read_weights
    from longtail.config import DataConfig, from_dict, read_toml
    from longtail.data.cifar import scan_pickle
    from longtail.data.images import FileImages
    from longtail.data.listings import find_images, paths_in_csv, read_csv, read_list
    from longtail.data.parquet import read_parquet
    from longtail.exports import read_head
    from longtail.files.tensors import read_tensors
    from longtail.outputs.readers import read_outputs
    from longtail.posthoc.priors import log_target
    from longtail.posthoc.priors import read_weights as read_prior
    from longtail.runs.record import read_journal, read_record

    def outputs(path: Path) -> None:
        found = read_outputs(path)
        sum(float(chunk.sum()) for _, chunk in found.rows().chunks())

    def array(path: Path) -> None:
        read_outputs(path, labels=path)

    def prior(path: Path) -> None:
        log_target(read_prior(path, ("a", "b", "c")), np.zeros(3), ("a", "b", "c"))

    def picture(path: Path) -> None:
        import torch

        images = FileImages(
            labels=torch.zeros(1).long(), class_names=("a",), root=path.parent, paths=np.array([path.name])
        )
        images.header(0)
        images.open(0)

    def record(path: Path) -> None:
        found = read_record(path)
        from_dict(found.config)

    def calibration(path: Path) -> None:
        folder = work / "calibrated"
        folder.mkdir(exist_ok=True)
        (folder / "calibration.json").write_bytes(path.read_bytes())
        read_head(folder)

    def parquet(path: Path) -> None:
        read_parquet([path], work, DataConfig()).images.class_counts.sum()

    readers: list[tuple[Reader, tuple[str, ...]]] = [
        (outputs, ("logits.npz", "logits.csv", "outputs.safetensors")),
        (array, ("logits.npy",)),
        (read_tensors, ("weights.safetensors", "outputs.safetensors")),
        (read_weights, ("weights.pth", "weights.safetensors")),
        (lambda path: read_list(path, work, DataConfig()), ("list.txt",)),
        (lambda path: read_csv(path, work, DataConfig()), ("images.csv",)),
        (lambda path: find_images([path], ("a",)), ("list.txt", "images.csv")),
        (paths_in_csv, ("images.csv",)),
        (prior, ("prior.csv",)),
        (lambda path: from_dict(read_toml(path)), ("settings.toml",)),
        (record, ("run.json",)),
        (calibration, ("calibration.json",)),
        (read_journal, ("metrics.jsonl",)),
        (lambda path: scan_pickle(path, ("data", "labels")), ("cifar", "cifar4")),
        (picture, tuple(f"picture.{kind}" for kind in ("png", "jpeg", "gif", "bmp", "webp", "tiff", "ppm"))),
    ]
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        return readers
    return [*readers, (parquet, ("table.parquet", "words.parquet"))]
