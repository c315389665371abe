"""How long calibration takes, beside what limits it and beside the usual way.

1. CIFAR-10-LT 100, ResNet-32: the whole of `longtail`'s calibration (one augmented view, extraction
   included) against one forward pass over the training set, and against the paper's stage two:
   2,000 batches of 512 through the network (a part of it is run and the rest extrapolated).
2. ImageNet-LT size: 115,846 x 1,000 logits made with the real class counts; `exact` against one
   `torch.logsumexp` over the same logits, torch SGD for 10 epochs, and SciPy without scaling.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import (
    cifar_root,
    peak_memory_mb,
    processor_seconds,
    restart_peak_memory,
    seconds,
    shared_folder,
    write_results,
)
from scipy.optimize import minimize
from torch import Tensor, nn

from longtail import MARC, Outputs
from longtail.backbones import BATCH
from longtail.data.imbalance import subsample_per_class
from longtail.data.loading import Sampler, in_order, load
from longtail.files.progress import Display
from longtail.heads.fold import head_of
from longtail.metrics.scores import evaluate
from longtail.posthoc.inputs import from_arrays
from longtail.posthoc.marc import class_weights
from longtail.runs.folder import Run
from longtail.runs.network import write_outputs


class Turns(Display):
    """Runs each batch through the plain network right after it was extracted.

    The speed of a virtual machine changes within seconds: only turns of a batch see the same machine.
    """

    def __init__(self, model: nn.Module, images: list[Tensor]) -> None:
        super().__init__(quiet=True)
        self.model = model.eval()
        self.waiting = list(images)
        self.seconds = 0.0

    @contextmanager
    def task(self, *_: object, **__: object) -> Iterator[Turns]:
        yield self

    def advance(self, amount: int, note: str = "") -> None:
        batch = self.waiting.pop(0)
        assert len(batch) == amount
        self.seconds += seconds(lambda: self.model(batch))  # extraction computes no gradients


def cifar(run_folder: Path, rounds: int, stage_two_steps: int) -> list[dict[str, object]]:
    """Calibration of a trained ResNet-32 beside a forward pass and beside the paper's stage two."""
    run = Run.open(run_folder).using(root=str(cifar_root()))
    splits = run.splits
    augmenting, clean = run.transforms()
    model = run.model()
    images = [batch.images for batch in load(splits.train, clean, in_order(len(splits.train), BATCH))]

    def calibrate() -> tuple[MARC, float]:
        """The calibration, and the seconds of a forward pass whose batches were run in turns with its own."""
        turns = Turns(model, images)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "o.safetensors"
            write_outputs(run.using(root=str, display=turns), "train", path, views=1)
            assert turns.waiting == []
            return MARC().fit(Outputs.open(path)), turns.seconds

    calibrated, _ = calibrate()
    times: dict[str, list[float]] = {"forward": [], "calibrate": []}
    for _ in range(rounds):
        began = time.perf_counter()
        _, beside = calibrate()
        times["forward"].append(beside)
        times["calibrate"].append(time.perf_counter() - began - beside)
    passes = [own / other for own, other in zip(times["calibrate"], times["forward"], strict=True)]

    def stage_two(steps: int, total: int = 2000) -> tuple[float, np.ndarray, np.ndarray]:
        """The paper's way: every batch through the frozen network."""
        head = head_of(model)
        norms = head.weight.detach().norm(dim=1)
        weights = torch.from_numpy(class_weights(run.class_counts, 1.2)).float()
        omega, beta = torch.ones(10, requires_grad=True), torch.zeros(10, requires_grad=True)
        optimizer = torch.optim.SGD([omega, beta], 0.05, 0.9, weight_decay=5e-4)
        sampler = Sampler(splits.train.labels.numpy(), seed=1)
        batches = load(splits.train, augmenting, (sampler.batch(step, 512) for step in range(steps)))
        model.eval()
        start = time.perf_counter()
        for step, batch in enumerate(batches):
            optimizer.param_groups[0]["lr"] = 0.025 * (1 + np.cos(np.pi * step / total))
            with torch.no_grad():
                logits = model(batch.images)
            loss = F.cross_entropy(omega * logits + beta * norms, batch.labels, weights, reduction="sum") / 512
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        taken = time.perf_counter() - start
        return taken * total / steps, omega.detach().numpy(), (beta * norms).detach().numpy()

    stage_two_seconds, _, _ = stage_two(stage_two_steps)
    with tempfile.TemporaryDirectory() as folder:
        path = write_outputs(run.using(root=str), "test", Path(folder) / "o.safetensors")
        test = Outputs.open(path)
        logits, labels = np.array(test.logits), test.labels

    def accuracy(values: np.ndarray) -> float:
        return 100 * evaluate(values, labels, run.class_counts).balanced

    with tempfile.TemporaryDirectory() as folder:
        path = write_outputs(run.using(root=str), "train", Path(folder) / "o.safetensors", views=3)
        sgd = MARC(solver="sgd").fit(Outputs.open(path))
    forward_seconds = statistics.median(times["forward"])
    rows = [
        ("one forward pass over the training set", times["forward"], [1.0], logits),
        ("longtail: extract one view, solve", times["calibrate"], passes, calibrated.transform(logits)),
        (
            f"the paper's stage two: 2,000 batches of 512 ({stage_two_steps} run)",
            [stage_two_seconds],
            [stage_two_seconds / forward_seconds],
            sgd.transform(logits),
        ),
    ]
    return [
        {
            "CIFAR-10-LT 100, ResNet-32": name,
            "seconds": statistics.median(taken),
            "forward passes": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
            "fastest, s": min(taken),
            "slowest, s": max(taken),
            "times faster than stage two": stage_two_seconds / statistics.median(taken),
            "test accuracy": accuracy(values),
        }
        for name, taken, ratios, values in rows
    ]


def imagenet_logits(folder: Path) -> Path:
    """Logits as a biased classifier gives them, labels and norms, in a file; the counts are the real ones."""
    counts = np.array(json.loads((shared_folder() / "golden/class_counts/robustlearn_ImageNet_LT.json").read_text()))
    generator = torch.Generator().manual_seed(0)
    labels = np.repeat(np.arange(len(counts)), counts)
    means = torch.randn(len(counts), 64, generator=generator)
    size = torch.from_numpy(counts / counts.max()).float()
    weight = 0.35 * means * (0.5 + 0.5 * size**0.15).unsqueeze(1)
    bias = 0.3 * torch.from_numpy(np.log(counts / counts.mean())).float()
    features = 0.6 * means[labels] + torch.randn(len(labels), 64, generator=generator)
    path = folder / "imagenet-lt.safetensors"
    logits = (features @ weight.T + bias).numpy()
    Outputs(labels, counts, logits=logits, head_weight=weight.numpy(), head_bias=bias.numpy()).save(path)
    return path


def imagenet_exact(path: Path) -> dict[str, float]:
    """Solve in this process and measure what it takes; processor time, in turns with what it is compared to."""
    torch.logsumexp(torch.randn(1000, 1000), 1)  # what torch needs for itself is not counted
    before = restart_peak_memory()
    mapped = Outputs.open(path)
    logits, counts, norms = torch.from_numpy(np.asarray(mapped.logits)), mapped.class_counts, mapped.weight_norms
    marc = MARC().fit(logits, mapped.labels, weight_norms=norms)
    memory = (peak_memory_mb() - before) / (logits.numel() * 4 / 2**20)
    chosen = subsample_per_class(mapped.labels, MARC().enough_images(len(counts)), seed=0)
    few, few_labels = logits[chosen], mapped.labels[chosen]
    times: dict[str, list[float]] = {"limit": [], "seconds": [], "few": []}
    for _ in range(3):
        times["limit"] += [processor_seconds(lambda: torch.logsumexp(logits, 1)) for _ in range(2)]
        times["seconds"].append(processor_seconds(lambda: MARC().fit(logits, mapped.labels, weight_norms=norms)))
        times["few"].append(
            processor_seconds(lambda: MARC().fit(few, few_labels, class_counts=counts, weight_norms=norms))
        )
    return {
        **{name: statistics.median(taken) for name, taken in times.items()},
        "few_share": len(chosen) / len(mapped),
        "passes": marc.result_.iterations,
        "gradient": marc.result_.gradient or 0.0,
        "value": marc.result_.value or 0.0,
        "memory": memory,
    }


def imagenet(folder: Path, processes: int) -> list[dict[str, object]]:
    path = imagenet_logits(folder)
    command = [sys.executable, __file__, "--imagenet-child", str(path)]
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(processes)
    ]
    best = sorted(runs, key=lambda run: run["seconds"] / run["limit"])[len(runs) // 2]
    outputs = Outputs.open(path)
    logits, labels = torch.from_numpy(np.array(outputs.logits)), torch.from_numpy(outputs.labels)
    data = from_arrays(logits, labels, weight_norms=outputs.weight_norms)
    weights = torch.from_numpy(class_weights(outputs.class_counts, 1.2))
    problem = MARC().problem(data, weights)
    identity = np.repeat([1.0, 0.0], len(weights))
    first = np.abs(problem.value_and_gradient(identity)[1]).max()
    limit = statistics.median(processor_seconds(lambda: torch.logsumexp(logits, 1)) for _ in range(5))
    columns = ("processor seconds", "logsumexp passes", "evaluations", "gradient / first", "loss", "memory / logits")

    def row(name: str, *values: float | None) -> dict[str, object]:
        return {"ImageNet-LT size, 115,846 x 1,000": name, **dict(zip(columns, values, strict=True))}

    rows = [row("one torch.logsumexp over the logits", best["limit"], 1.0, None, None, None, None)]
    rows.append(
        row(
            "longtail exact",
            best["seconds"],
            best["seconds"] / best["limit"],
            best["passes"],
            best["gradient"],
            best["value"],
            best["memory"],
        )
    )
    few = best["few"]
    rows.append(row(f"on {100 * best['few_share']:.0f} % of the images (auto)", few, few / best["limit"], *4 * [None]))
    start = time.process_time()
    options = {"maxfun": 150, "gtol": 0, "ftol": 0}
    plain = minimize(problem.value_and_gradient, identity, jac=True, method="L-BFGS-B", options=options)
    taken = time.process_time() - start
    gradient = np.abs(problem.value_and_gradient(plain.x)[1]).max() / first
    rows.append(row("SciPy L-BFGS-B without scaling", taken, taken / limit, plain.nfev, gradient, plain.fun, None))
    steps = 10 * len(labels) // 256
    start = time.process_time()
    sgd = MARC(solver="sgd", batch_size=256, max_iter=steps).fit(logits, labels, weight_norms=outputs.weight_norms)
    taken = time.process_time() - start
    value, slope = problem.value_and_gradient(np.concatenate([sgd.omega_, sgd.beta_]))
    rows.append(row("torch SGD, 10 epochs", taken, taken / limit, steps, np.abs(slope).max() / first, value, None))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a finished cifar10-lt-100 run (without: ImageNet-LT size)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stage-two-steps", type=int, default=100)
    parser.add_argument("--processes", type=int, default=3, help="in which ImageNet-LT size is measured; the median")
    parser.add_argument("--imagenet-child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.run:
        torch.set_num_threads(1)
    if arguments.imagenet_child:
        print(json.dumps(imagenet_exact(arguments.imagenet_child)))
        return
    if arguments.run:
        write_results(
            "calibrate_cifar",
            "Calibration of a ResNet-32 on CIFAR-10-LT 100",
            cifar(arguments.run, arguments.rounds, arguments.stage_two_steps),
            "Asked for: ≤ 1.10 forward passes, ≥ 60 x faster than stage two, accuracy no lower than 0.3 points below. "
            "Accuracy of stage two is that of the same 2,000 steps of SGD on three stored views. "
            "Extraction folds batch-norm into the convolutions, so it can take less than a pass of the network as "
            "trained.",
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        large = imagenet(Path(folder), arguments.processes)
    write_results(
        "calibrate_imagenet_size",
        "Calibration at the size of ImageNet-LT",
        large,
        "Processor time on one thread. `exact` runs in a process of its own, in turns with the logsumexp; memory is "
        "the growth of its peak resident memory, the logits included. An evaluation of a part of the rows counts as "
        "its share. Asked for: ≤ 12 logsumexp passes on all images, ≤ 6 with --images-per-class auto, gradient ≤ 1e-5 "
        "of the first, memory ≤ 1.3 x the logits.",
    )


if __name__ == "__main__":
    main()
