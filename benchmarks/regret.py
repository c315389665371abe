"""What a rule loses to the best of the methods it could have taken, and what HALO's prior and weights bring.

Regret: balanced test accuracy of the best of softmax (unchanged), logit adjustment, MARC, cRT and HALO, chosen with a
look at the test images, minus that of the rule. Three groups of networks:

    digits     48 small networks: three methods of training, imbalance 1 to 30, four seeds; 30 and 100 % of the held-out
               images
    weak       MLPs on principal components of CIFAR, 3 to 100 classes of any imbalance, trained for 100 to 2,000 steps,
               a fifth of them with balanced softmax; 20, 200 and all held-out images
    released   the released networks; 10, 30 and 100 % of their held-out images

    python benchmarks/regret.py digits weak released --root data

Outputs of the networks are kept in LONGTAIL_FEATURES (default: benchmarks/.data), scores beside them; a run that was
stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from common import cifar_root, write_results
from halo_cases import KEPT
from scipy.special import log_softmax

import longtail.posthoc.halo as halo_module
from longtail import HALO, RECIPES, Outputs, train
from longtail.config import DataConfig
from longtail.data import open_splits
from longtail.metrics.scores import evaluate
from longtail.posthoc.candidates import try_candidates
from longtail.posthoc.halo import mixture
from longtail.posthoc.inputs import from_outputs
from longtail.posthoc.priors import like_training, sample_weights, shifted, to_effective_number
from longtail.runs.folder import Run
from longtail.runs.record import copy_released, find_released, released_names

FOLDER = KEPT / "regret"
CANDIDATES = ("softmax", "logit-adjustment", "marc", "crt", "halo")
SIZES = {"digits": (0.3, 1), "weak": (20, 200, 1), "released": (0.1, 0.3, 1)}
WEAK_NETWORKS = 120
Arrays = dict[str, np.ndarray]


def outputs_of(run: Run) -> Arrays:
    splits = {"train": run.outputs("train", views=1), "val": run.outputs("validation"), "test": run.outputs("test")}
    arrays: Arrays = {}
    for name, own in splits.items():
        arrays |= {f"{name}_f": np.asarray(own.features), f"{name}_l": np.asarray(own.logits), f"{name}_y": own.labels}
    head = splits["train"]
    return {**arrays, "W": head.head_weight, "b": head.head_bias, "counts": head.class_counts}


def digits(root: Path) -> Iterator[tuple[str, Callable[[], Arrays]]]:
    def trained(method: str, imbalance: int, seed: int) -> Arrays:
        with tempfile.TemporaryDirectory() as folder:
            config = replace(RECIPES["digits-lt"], seed=seed, method=method, imbalance=float(imbalance), device="cpu")
            train(config, Path(folder) / "run", progress=False)
            return outputs_of(Run.open(Path(folder) / "run"))

    for method in ("softmax", "balanced-softmax", "cbs"):
        for imbalance in (1, 3, 10, 30):
            for seed in range(4):
                yield (
                    f"digits-{method}-{imbalance}-{seed}",
                    partial(trained, method, imbalance, seed),
                )


def released(root: Path) -> Iterator[tuple[str, Callable[[], Arrays]]]:
    def stored(name: str) -> Arrays:
        copy = copy_released(find_released(f"released:{name}"), FOLDER / "runs" / name)
        return outputs_of(Run.open(copy).using(root=str(root)))

    for name in released_names():
        yield f"released-{name}", partial(stored, name)


def components(root: Path, data: str, known: dict[str, tuple[Any, ...]]) -> tuple[Any, ...]:
    """64 principal components of the pixels of CIFAR, of equal variance; training and test images with labels."""
    if data not in known:
        splits = open_splits(DataConfig(data=data, root=str(root), profile="none", validation=0))
        pixels = [split.pixels.flatten(1).numpy().astype(np.float32) / 255 for split in (splits.train, splits.test)]
        centre = pixels[0].mean(0)
        axes = np.linalg.eigh(np.cov((pixels[0][::10] - centre).T))[1][:, ::-1][:, :64].astype(np.float32)
        found = [(own - centre) @ axes for own in pixels]
        scale = found[0].std(0)
        known[data] = found[0] / scale, splits.train.labels.numpy(), found[1] / scale, splits.test.labels.numpy()
    return known[data]


def weak(root: Path) -> Iterator[tuple[str, Callable[[], Arrays]]]:
    known: dict[str, tuple[Any, ...]] = {}
    for number in range(WEAK_NETWORKS):
        yield f"weak-{number:03d}", partial(weak_network, number, root, known)


def weak_network(number: int, root: Path, known: dict[str, tuple[Any, ...]]) -> Arrays:
    rng = np.random.default_rng(1000 + number)
    torch.manual_seed(number)
    of = int(rng.choice([10, 100]))
    classes = int(rng.choice([3, 5, 10] if of == 10 else [10, 20, 50, 100]))
    inputs, labels, test, test_labels = components(root, f"cifar{of}", known)
    chosen, most = rng.permutation(of)[:classes], int(rng.integers(100, 450 if of == 100 else 2000))
    imbalance = float(np.exp(rng.uniform(np.log(3), np.log(100))))
    counts = np.maximum((most * imbalance ** (-np.arange(classes) / max(classes - 1, 1))).astype(int), 2)
    rows = [rng.permutation(np.flatnonzero(labels == c))[:n] for c, n in zip(chosen, counts, strict=True)]
    own = np.repeat(np.arange(classes), [len(part) for part in rows])
    rows_of_test = [np.flatnonzero(test_labels == c) for c in chosen]
    share, held = float(rng.choice([0.1, 0.2])), np.zeros(len(own), dtype=bool)
    for k in range(classes):
        members = np.flatnonzero(own == k)
        held[rng.permutation(members)[: max(1, round(share * len(members)))]] = True
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2))
    head = torch.nn.Linear(64, classes)
    optimizer = torch.optim.Adam([*network.parameters(), *head.parameters()], lr=3e-3, weight_decay=1e-4)
    images = inputs[np.concatenate(rows)]
    seen, targets = torch.from_numpy(images[~held]), torch.from_numpy(own[~held])
    log_prior = torch.from_numpy(np.bincount(own[~held], minlength=classes) / (~held).sum()).float().log()
    balanced, steps = rng.random() < 0.2, int(np.exp(rng.uniform(np.log(100), np.log(2000))))
    for _ in range(steps):
        batch = torch.randint(len(targets), (128,))
        logits = head(network(seen[batch]))
        optimizer.zero_grad()
        F.cross_entropy(logits + log_prior if balanced else logits, targets[batch]).backward()
        optimizer.step()
    network.eval()
    arrays: Arrays = {"W": head.weight.detach().numpy(), "b": head.bias.detach().numpy()}
    tested = np.repeat(np.arange(classes), [len(part) for part in rows_of_test])
    parts = {"train": (images[~held], own[~held]), "val": (images[held], own[held])}
    with torch.no_grad():
        for name, (x, y) in {**parts, "test": (test[np.concatenate(rows_of_test)], tested)}.items():
            features = network(torch.from_numpy(x))
            arrays |= {f"{name}_f": features.numpy(), f"{name}_l": head(features).numpy(), f"{name}_y": y}
    return {**arrays, "counts": np.bincount(own[~held], minlength=classes)}


def split_of(arrays: Arrays, name: str, rows: Any = slice(None)) -> Outputs:
    head = {"head_weight": arrays["W"], "head_bias": arrays["b"], "features": arrays[f"{name}_f"][rows]}
    labels, split = arrays[f"{name}_y"][rows].astype(np.int64), {"val": "validation"}.get(name, name)
    return Outputs(labels, arrays["counts"], logits=arrays[f"{name}_l"][rows], split=split, **head)


def halo_before(coupled: bool, own_counts: bool) -> ExitStack:
    """HALO with a prior of c alone, N(-0.45, 0.2^2), or weights n^(-1/2) where held-out images look like training."""

    def usual_weights(labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
        like = like_training(np.bincount(labels, minlength=len(counts)), counts)
        return to_effective_number((counts**-0.5)[labels]) if like else sample_weights(labels, counts)

    build = mixture.Mixture.__init__

    def uncoupled(self: mixture.Mixture, *given: Any, **named: Any) -> None:
        build(self, *given, **named)
        self.coupling = np.eye(len(self.means))

    stack = ExitStack()
    if not coupled:
        stack.enter_context(mock.patch.dict(mixture.PRIORS, {"prior": mixture.Prior(-0.45, 0.2)}))
        stack.enter_context(mock.patch.object(mixture.Mixture, "__init__", uncoupled))
    if not own_counts:
        stack.enter_context(mock.patch.object(halo_module, "sample_weights", usual_weights))
    return stack


def scores_of(arrays: Arrays, size: float, seed: int) -> dict[str, list[float]]:
    """Balanced test accuracy and ECE of every candidate, mean and variant of HALO; {} without two held-out classes."""
    seen, test, total = split_of(arrays, "train"), split_of(arrays, "test"), len(arrays["val_y"])
    number = total if size == 1 else int(size) if size > 1 else round(size * total)
    held = split_of(arrays, "val", np.sort(np.random.default_rng(seed).permutation(total)[:number]))
    if len(np.unique(held.labels)) < 2:
        return {}
    trial = try_candidates(from_outputs(seen), from_outputs(held, need_every_class=False), "uniform")

    def scored(logits: np.ndarray) -> list[float]:
        found = evaluate(logits, test.labels, test.class_counts)
        return [100 * found.balanced, 100 * found.ece]

    logits = {}
    for one in trial.candidates:
        moved = shifted(torch.from_numpy(np.asarray(one.method.transform(test))), one.target_shift)
        logits[one.name] = log_softmax(moved.numpy().astype(np.float64), 1)
    scores = {name: scored(own) for name, own in logits.items()}
    scores["mean of log-probabilities"] = scored(np.mean(list(logits.values()), 0))
    effective, likelihood = 1 / np.square(trial.weights).sum(), np.array([trial.mean(one) for one in trial.candidates])
    weights = np.exp(0.3 * effective * (likelihood - likelihood.max()))
    mixed = np.einsum("c,cnk->nk", weights / weights.sum(), np.stack(list(logits.values())))
    scores["weighted by likelihood"] = scored(mixed)
    scores["highest likelihood"] = scores[CANDIDATES[int(likelihood.argmax())]]
    every = len(np.unique(held.labels)) == len(arrays["counts"])
    scores["HALO if every class has a held-out image, else logit adjustment"] = scores[
        "halo" if every else "logit-adjustment"
    ]
    for name, how in {"before": (0, 0), "coupled prior alone": (1, 0), "own counts alone": (0, 1)}.items():
        with halo_before(*map(bool, how)):
            scores[f"HALO, {name}"] = scored(HALO().fit(seen, validation=held).transform(test))
    return scores


def measured(group: str, root: Path) -> list[dict[str, list[float]]]:
    """Scores of every case of a group; those that are kept are not computed again."""
    kept = FOLDER / f"{group}.json"
    known: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {}
    for name, make in {"digits": digits, "weak": weak, "released": released}[group](root):
        if not (FOLDER / f"{name}.npz").is_file():
            np.savez(FOLDER / f"{name}.npz", **make())
        with np.load(FOLDER / f"{name}.npz") as file:
            arrays = {key: file[key] for key in file.files}
        for size in SIZES[group]:
            case = f"{name}, {size:g}"
            if case not in known and (size <= 1 or size < len(arrays["val_y"])):
                known[case] = scores_of(arrays, size, zlib.crc32(case.encode()))
                kept.write_text(json.dumps(known))
    return [case for case in known.values() if case]  # held-out images of one class are no case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", choices=list(SIZES))
    parser.add_argument("--root", type=Path, help="folder of CIFAR; default: unpacked from LONGTAIL_SHARED")
    given = parser.parse_args()
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    if given.root is None and given.groups != ["digits"]:
        cifar_root("cifar10")
        given.root = cifar_root("cifar100")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = {group: measured(group, given.root) for group in given.groups}
    rows = []
    for rule in next(iter(cases.values()))[0]:
        row: dict[str, Any] = {"rule or method": "**HALO (the default)**" if rule == "halo" else rule}
        for group, scores in cases.items():
            best = np.array([max(case[name][0] for name in CANDIDATES) for case in scores])
            own = np.array([case[rule] for case in scores])
            lost = best - own[:, 0]
            row[f"{group}: {len(scores)} cases"] = (
                f"{lost.mean():.2f} ({np.percentile(lost, 95):.2f}); {own[:, 0].mean():.1f}, ECE {own[:, 1].mean():.1f}"
            )
        rows.append(row)
    notes = (
        "Mean regret, its 95th percentile in brackets, mean balanced test accuracy and ECE. Regret is in points of "
        "balanced accuracy, against the best of softmax (unchanged), logit adjustment, MARC, cRT and HALO on the test "
        "images. *weighted by likelihood*: mean of log-probabilities, weights from the cross-validated likelihood with "
        "a prior towards equal ones. *before*: HALO without the coupled prior and without weights by the held-out "
        "images' own counts."
    )
    write_results("regret", "What a rule loses to the best method", rows, notes)


if __name__ == "__main__":
    main()
