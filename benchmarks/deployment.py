"""Class frequencies of a deployment and prediction sets, on the released networks; nothing is trained.

prior   forward and backward long-tailed test sets of imbalance 2 to 50 (the protocol of LADE and SADE): the target
        prior fixed, estimated from the unlabelled test images, and known
sets    prediction sets: coverage of the classes and size

python benchmarks/deployment.py prior sets --root data
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import halo_cases
import numpy as np
from common import title_of, write_results
from scipy.special import softmax

from longtail import HALO, MARC, Outputs
from longtail.data.imbalance import profile_indices
from longtail.errors import UserError
from longtail.metrics.scores import shot_groups
from longtail.posthoc.deployment import SetScores
from longtail.posthoc.held_out import FOLDS, out_of_fold_logits, stratified_folds
from longtail.posthoc.inputs import from_outputs
from longtail.posthoc.prior_estimate import PriorCheck, PriorEstimate, PriorEstimator, check_prior
from longtail.runs.record import RELEASED, released_names

PROFILES = [("forward", factor) for factor in (50, 25, 10, 5, 2)] + [
    ("backward", factor) for factor in (2, 5, 10, 25, 50)
]
FEW_IMAGES = (200, 50)
COVERAGES = (0.8, 0.9, 0.95)
UNIFORM, KNOWN, FITS = "uniform", "known", "share that fits"
ORDER = ("as trained", UNIFORM, "estimated", *(f"estimated, {number} images" for number in FEW_IMAGES), KNOWN)
NOTES = (
    "Top-1 accuracy, per cent, on long-tailed versions of the test split: forward (as in training) and backward, of "
    "imbalance 2, 5, 10, 25 and 50; mean over seeds. Uniform: the target prior stays balanced (of Softmax: logit "
    "adjustment). Estimated: the power of the training prior is estimated from the same images without labels, or from "
    "some of them, after the trial on held-out images; where that refuses, the uniform prior stays. Known: the true "
    "frequencies. HALO's scores of held-out images are out of fold."
)
SETS = {"HALO": COVERAGES, "MARC": (0.9,), "logit adjustment": (0.9,)}


@dataclass(frozen=True)
class Scored:
    """Logits of a method that are right for a target prior: of unseen images, out of fold, and of test images."""

    held_out: np.ndarray
    test: np.ndarray
    log_target: np.ndarray

    def at_equal_classes(self) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities of unseen and of test images."""
        return softmax(self.held_out - self.log_target, axis=1), softmax(self.test - self.log_target, axis=1)


def scored(seen: Outputs, held: Outputs, test: Outputs) -> dict[str, Scored]:
    uniform, log_prior = np.zeros(len(seen.class_counts)), np.log(seen.class_counts / seen.class_counts.sum())
    halo, marc = HALO().fit(seen, validation=held), MARC().fit(seen)
    folds = stratified_folds(held.labels, FOLDS, seed=0)
    data, held_out = from_outputs(seen), from_outputs(held, need_every_class=False)
    out_of_fold = out_of_fold_logits(halo, data, held_out, folds).numpy()
    own = [np.asarray(part.rows().read(slice(None)), dtype=np.float64) for part in (held, test)]
    return {
        "HALO": Scored(out_of_fold.astype(np.float64), np.asarray(halo.transform(test), np.float64), uniform),
        "MARC": Scored(*(np.asarray(marc.transform(part), np.float64) for part in (held, test)), uniform),
        "Softmax": Scored(own[0], own[1], log_prior),
    }


def cases(root: str | None) -> Iterator[tuple[str, Outputs, Outputs, Outputs]]:
    """Released networks with a validation split, by data set and length of training."""
    for name in released_names():
        case = next(halo_cases.runs([Path(RELEASED + name)], root))
        print(name, file=sys.stderr, flush=True)
        seen, held, test = case
        assert held is not None
        data = title_of(name.split("-resnet32")[0])
        yield f"{data}, 200 epochs" if "200epochs" in name else data, seen, held, test


def tried(own: Scored, check: PriorCheck | None, log_prior: np.ndarray, rows: np.ndarray) -> PriorEstimate | None:
    """The estimate from unlabelled images; None if it is refused."""
    try:
        return PriorEstimator(log_prior, own.log_target, check).estimate(softmax(own.test[rows], axis=1))
    except UserError as error:
        print(error, file=sys.stderr)
        return None


def prior_case(seen: Outputs, held: Outputs, test: Outputs) -> dict[tuple[str, str], list[float]]:
    """Accuracy on every profile by method and target prior; the known and estimated power of HALO, too."""
    log_prior = np.log(seen.class_counts / seen.class_counts.sum())
    order, rng = np.argsort(-seen.class_counts, kind="stable"), np.random.default_rng(0)
    found: dict[tuple[str, str], list[float]] = {}
    for name, own in scored(seen, held, test).items():
        check = check_prior(softmax(own.held_out, axis=1), held.labels, own.log_target, log_prior)
        for direction, factor in PROFILES:
            rows = profile_indices(test.labels, factor, direction, class_order=order)
            labels, evidence = test.labels[rows], own.test[rows] - own.log_target
            known = np.log(np.bincount(labels, minlength=len(log_prior)))
            targets = {"as trained": own.log_target, UNIFORM: 0 * log_prior, KNOWN: known}
            estimates = {"estimated": tried(own, check, log_prior, rows)}
            for number in FEW_IMAGES:
                few = tried(own, check, log_prior, rng.permutation(rows)[:number])
                estimates[f"estimated, {number} images"] = few
            targets |= {how: (0.0 if one is None else one.power) * log_prior for how, one in estimates.items()}
            for how, target in targets.items():
                accuracy = float(((evidence + target).argmax(1) == labels).mean())
                found.setdefault((name, how), []).append(100 * accuracy)
            whole = estimates["estimated"]
            power = np.log(factor) / np.ptp(log_prior) * (1 if direction == "forward" else -1)
            found.setdefault((name, "power: known"), []).append(power)
            found.setdefault((name, "power: estimated"), []).append(np.nan if whole is None else whole.power)
            found.setdefault((name, FITS), []).append(np.nan if whole is None else whole.fits)
    return found


def prior(root: str | None) -> None:
    """Means over seeds: over all profiles, and by profile."""
    by_data: dict[str, list[dict[tuple[str, str], list[float]]]] = {}
    for data, seen, held, test in cases(root):
        by_data.setdefault(data, []).append(prior_case(seen, held, test))
    summary, profiles = [], []
    for data, seeds in by_data.items():
        values = {key: np.array([seed[key] for seed in seeds]) for key in seeds[0]}
        for name in dict.fromkeys(name for name, _ in values):
            own = {how: value for (of, how), value in values.items() if of == name}
            start = {"data (seeds)": f"{data} ({len(seeds)})", "method": name}
            means = {how: float(value.mean()) for how, value in own.items() if how in ORDER}
            refused = int(np.isnan(own["power: estimated"]).sum())
            gain = (means["estimated"] - means[UNIFORM]) / (means[KNOWN] - means[UNIFORM])
            row = {how: f"{means[how]:.1f}" for how in ORDER}
            row["as trained"] = row["as trained"] if name == "Softmax" else ""  # the others start from uniform
            summary.append({**start, **row, "share of the gain": f"{100 * gain:.0f} %", "refused": refused})
            for how in (UNIFORM, "estimated", KNOWN, "power: known", "power: estimated", FITS):
                digits = 1 if how in ORDER else 2
                cells = ["refused" if np.isnan(one).all() else f"{np.nanmean(one):.{digits}f}" for one in own[how].T]
                shown = {f"{order} {factor}": cell for (order, factor), cell in zip(PROFILES, cells, strict=True)}
                profiles.append({**start, "target prior": how, **shown})
    title = "The class frequencies of a deployment, estimated from unlabelled images"
    write_results("prior", title, summary, f"{NOTES} By profile: [table](prior_profiles.md).")
    notes = (
        f"{NOTES} {FITS.capitalize()}: of the networks for which the images look like a power of the training prior."
    )
    write_results("prior_profiles", f"{title}: by profile", profiles, notes)


def set_case(seen: Outputs, held: Outputs, test: Outputs) -> dict[tuple[str, float], list[float]]:
    """Macro and few-shot coverage, that of the worst class, and mean size, by method and promise."""
    found, own = {}, scored(seen, held, test)
    own["logit adjustment"] = own["Softmax"]
    for name, promises in SETS.items():
        unseen, probabilities = own[name].at_equal_classes()
        scores = SetScores.of(unseen, held.labels, calibrated=name == "HALO")
        assert scores is not None
        for promise in promises:
            found[name, promise] = measured(scores.sets(probabilities, promise), test)
    # What most people do: the softmax as it is, every unseen image with the same weight.
    unseen, probabilities = softmax(own["Softmax"].held_out, axis=1), softmax(own["Softmax"].test, axis=1)
    plain = 1 - unseen[np.arange(len(held)), held.labels]
    level = min(np.ceil((len(plain) + 1) * 0.9) / len(plain), 1)
    sets = 1 - probabilities <= np.quantile(plain, level, method="higher")
    found["Softmax, not weighted", 0.9] = measured(sets, test)
    return found


def measured(sets: np.ndarray, test: Outputs) -> list[float]:
    hits = sets[np.arange(len(test)), test.labels]
    of_class = np.array([hits[test.labels == label].mean() for label in range(sets.shape[1])])
    few = shot_groups(test.counts_for_groups)["few"]
    return [of_class.mean(), of_class[few].mean() if few.any() else np.nan, of_class.min(), sets.sum(1).mean()]


def sets(root: str | None) -> None:
    """One table: mean over seeds, by data set, and the range of the macro coverage."""
    by_data: dict[str, list[tuple[int, dict[tuple[str, float], list[float]]]]] = {}
    for data, seen, held, test in cases(root):
        by_data.setdefault(data, []).append((len(held), set_case(seen, held, test)))
    rows = []
    for data, seeds in by_data.items():
        for name, promise in seeds[0][1]:
            values = np.array([seed[name, promise] for _, seed in seeds])
            macro, few, worst, size = values.mean(0)
            ends = f"{100 * values[:, 0].min():.1f} to {100 * values[:, 0].max():.1f}"
            row = {"data (seeds)": f"{data} ({len(seeds)})", "unseen images": f"{seeds[0][0]:,}", "method": name}
            row |= {"promised": f"{100 * promise:g}", "coverage of classes": f"{100 * macro:.1f}", "over seeds": ends}
            row |= {
                "few-shot classes": "" if np.isnan(few) else f"{100 * few:.1f}",
                "worst class": f"{100 * worst:.0f}",
            }
            rows.append({**row, "classes in a set": f"{size:.1f}"})
    notes = (
        "Prediction sets for the (balanced) test images, thresholds from the unseen images of the run: their scores "
        "are out of fold for HALO. Coverage in per cent, mean over classes; few-shot: classes with fewer than 20 "
        "training images. Softmax, not weighted: plain split conformal prediction, whose promise is about images as "
        "they come."
    )
    write_results("sets", "Prediction sets", rows, notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("prior", "sets"))
    parser.add_argument("--root", help="folder with the images of CIFAR")
    options = parser.parse_args()
    for part in options.parts:
        {"prior": prior, "sets": sets}[part](options.root)


if __name__ == "__main__":
    main()
