"""Calibration at the size of iNaturalist 2018, which does not fit in memory as logits (14 GB).

437,513 features of 256 numbers with the real class counts (8,142 classes) are made and written to a
memory-mapped file, row by row; `exact` then runs in a process of its own and computes the logits chunk by
chunk in every pass. Reported: processor time, passes over the data, growth of resident memory, the speed of the
product of features and head beside that of a large square product, and balanced accuracy on 3 fresh samples per
class before and after.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from common import peak_memory_mb, processor_seconds, restart_peak_memory, shared_folder, write_results

from longtail import MARC, Outputs
from longtail.files.tensors import create
from longtail.outputs.record import Header

WIDTH = 256
ROWS = 4096


def class_counts(share: float) -> np.ndarray:
    """Images per class of iNaturalist 2018, or a share of them, two at least."""
    file = shared_folder() / "golden/class_counts/robustlearn_iNaturalist18.json"
    counts = np.array(json.loads(file.read_text()))
    return np.maximum((counts * share).round(), 2).astype(np.int64)


def pieces(labels: np.ndarray, means: torch.Tensor, seed: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Features of these labels, some rows at a time: near their class's mean, and unlike it."""
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, len(labels), ROWS):
        rows = slice(start, min(start + ROWS, len(labels)))
        noise = torch.randn(rows.stop - start, WIDTH, generator=generator)
        yield rows, (0.3 * means[torch.from_numpy(labels[rows])] + noise).numpy()


def write_features(folder: Path, share: float) -> tuple[Path, Path]:
    """Training and test features through the head of a classifier that is biased to large classes, as files."""
    counts = class_counts(share)
    means = torch.randn(len(counts), WIDTH, generator=torch.Generator().manual_seed(0))
    size = torch.from_numpy(counts / counts.max()).float()
    weight = (0.2 * means * (0.5 + 0.5 * size**0.15).unsqueeze(1)).numpy()
    bias = 0.3 * np.log(counts / counts.mean()).astype(np.float32)
    paths = []
    for split, of_class, seed in (("train", counts, 1), ("test", np.full(len(counts), 3), 2)):
        labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), of_class))
        small = {"labels": labels, "class_counts": counts, "head_weight": weight, "head_bias": bias}
        shapes = {name: (value.shape, value.dtype) for name, value in small.items()}
        shapes["features"] = ((len(labels), WIDTH), np.dtype(np.float32))
        path = folder / f"{split}.safetensors"
        with create(path, shapes, Header(split).to_dict()) as arrays:
            for name, value in small.items():
                arrays[name][...] = value
            for rows, features in pieces(labels, means, seed):
                arrays["features"][rows] = features
        paths.append(path)
    return paths[0], paths[1]


def balanced(outputs: Outputs, scale: np.ndarray, shift: np.ndarray) -> float:
    """Balanced accuracy of calibrated logits, chunk by chunk; every class has as many samples."""
    factor, offset = torch.from_numpy(scale).float(), torch.from_numpy(shift).float()
    labels = torch.from_numpy(outputs.labels)
    right = sum(
        int(((logits * factor + offset).argmax(1) == labels[rows]).sum()) for rows, logits in outputs.rows().chunks()
    )
    return 100 * right / len(outputs)


def product_speeds(outputs: Outputs) -> tuple[float, float]:
    """Billions of float32 operations in a processor second: logits from features by chunks; a large square product."""
    size = min(len(outputs), 20 * outputs.rows().chunk_rows)
    square, out = torch.randn(2048, 2048), torch.empty(2048, 2048)
    chunks, large = [], []
    for _ in range(5):  # in turns, so that both see the machine alike
        chunks.append(processor_seconds(lambda: [None for _ in outputs.rows().chunks(0, size)]))
        large.append(processor_seconds(lambda: torch.mm(square, square, out=out)))
    return (2 * size * outputs.num_classes * WIDTH / min(chunks) / 1e9, 2 * 2048**3 / min(large) / 1e9)


def solve(train: Path, test: Path) -> dict[str, float]:
    """Calibrate in this process and measure what it takes."""
    torch.logsumexp(torch.randn(256, 256) @ torch.randn(256, 1000), 1)  # what torch needs for itself is not counted
    at_first = restart_peak_memory()
    outputs, held_out = Outputs.open(train), Outputs.open(test)
    marc = MARC()
    processor = processor_seconds(lambda: marc.fit(outputs))
    memory = peak_memory_mb()
    part = len(outputs) // 10
    one_pass = processor_seconds(lambda: [logits.logsumexp(1) for _, logits in outputs.rows().chunks(0, part)])
    product, large = product_speeds(outputs)
    return {
        "processor": processor,
        "one_pass": 10 * one_pass,
        "passes": marc.result_.iterations,
        "gradient": marc.result_.gradient or 0.0,
        "converged": float(marc.result_.converged),
        "memory": memory,
        "growth": memory - at_first,
        "product": product,
        "large": large,
        "before": balanced(held_out, np.ones(held_out.num_classes), np.zeros(held_out.num_classes)),
        "after": balanced(held_out, marc.scale_, marc.shift_),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="of the images of each class")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the features are written (default: a temporary folder)")
    parser.add_argument("--child", type=Path, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.child:
        print(json.dumps(solve(*arguments.child)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        train, test = write_features(Path(folder), arguments.share)
        samples, size = len(Outputs.open(train)), train.stat().st_size
        command = [sys.executable, __file__, "--threads", str(arguments.threads), "--child", str(train), str(test)]
        taken = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    classes = len(class_counts(arguments.share))
    row = {
        "samples x classes": f"{samples:,} x {classes:,}",
        "logits, GB": 4 * samples * classes / 2**30,
        "features, GB": size / 2**30,
        "peak resident memory, GB": taken["memory"] / 1024,
        "growth after imports / features": taken["growth"] * 2**20 / size,
        "passes": taken["passes"],
        "processor seconds": taken["processor"],
        "of one pass (logits and logsumexp)": taken["one_pass"],
        "product, GFLOP/s": taken["product"],
        "% of a large square product": 100 * taken["product"] / taken["large"],
        "gradient / first": taken["gradient"],
        "solved": "yes" if taken["converged"] else "no",
        "balanced before": taken["before"],
        "after": taken["after"],
    }
    write_results(
        "inaturalist_size",
        "Calibration at the size of iNaturalist 2018",
        [row],
        "Class counts are the real ones, features (256 numbers) are synthetic and memory-mapped; logits are computed "
        "from them chunk by chunk in every pass. A pass over a part of the rows counts as its share. Memory is "
        "resident memory of the solving process, the mapped pages included. The machine was not idle: processor "
        "seconds are what the work takes on one thread of it. Asked for: ≤ 14 passes, growth ≤ 1.1 x the features, "
        "a product at ≥ 60 % of the speed of a large square one.",
        share=arguments.share,
    )


if __name__ == "__main__":
    main()
