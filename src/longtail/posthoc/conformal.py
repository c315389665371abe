"""Prediction sets: as many classes as it takes to contain the true one with a promised probability.

Split conformal prediction on unseen samples. The score of a class is 1 - p, its probability p at equal classes. The
samples are weighted to equal classes, so the promise is about the mean coverage of the classes, however rare they are;
a class that has few unseen samples cannot be promised its own.

Paper: Podkopaev and Ramdas, Distribution-free uncertainty quantification for classification under label shift,
UAI 2021 (weights of classes in split conformal prediction).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from longtail.errors import UserError, number

FEWEST_SAMPLES = 30
FEW_OF_A_CLASS = 10
LEVELS = 1000


@dataclass(frozen=True)
class SetScores:
    """Scores of unseen samples, weighted to equal classes.

    Args:
        counts: (K,) unseen samples per class.
        quantiles: (1001,) of the scores, for shares 0, 0.001, … 1.
    """

    counts: tuple[int, ...]
    quantiles: tuple[float, ...]

    @classmethod
    def of(cls, probabilities: np.ndarray, labels: np.ndarray) -> SetScores | None:
        """From probabilities at equal classes (M, K) and labels (M,) of unseen samples; None if they are too few."""
        if len(labels) < FEWEST_SAMPLES:
            return None
        counts = np.bincount(labels, minlength=probabilities.shape[1])
        scores, weights = 1 - probabilities[np.arange(len(labels)), labels], 1 / counts[labels]
        order = np.argsort(scores)
        shares = np.cumsum(weights[order]) / weights.sum()
        # Rounding must not move a share that is met exactly to the next score.
        places = np.searchsorted(shares, np.arange(LEVELS + 1) / LEVELS - 1e-9)
        return cls(tuple(counts.tolist()), tuple(scores[order][np.minimum(places, len(labels) - 1)].tolist()))

    def thresholds(self, coverage: float) -> np.ndarray:
        """(K,) the largest score of a class in a set; infinite where too few samples are known.

        The new sample counts, too: it could have the largest score, and its weight is that of a sample of its class.
        """
        number("coverage", coverage, above=0, below=1)
        counts = np.array(self.counts)
        shares = coverage * (1 + 1 / np.maximum(counts, 1) / (counts > 0).sum())
        levels = np.ceil(LEVELS * shares - 1e-9).astype(int)
        if (levels > LEVELS).all():
            raise UserError(
                f"a coverage of {coverage:g} needs more unseen samples than the {counts.sum():,} of the calibration: "
                "ask for less, or hold out more"
            )
        found = np.array(self.quantiles)[np.minimum(levels, LEVELS)]
        return np.where(levels > LEVELS, np.inf, found)

    def sets(self, probabilities: np.ndarray, coverage: float) -> np.ndarray:
        """(N, K) which classes are in the set of each sample, from probabilities at equal classes; never none."""
        chosen = 1 - probabilities <= self.thresholds(coverage)
        chosen[np.arange(len(chosen)), probabilities.argmax(1)] = True
        return np.asarray(chosen)

    @property
    def effective_number(self) -> float:
        """How many samples of equal classes tell as much as these."""
        counts = np.array([count for count in self.counts if count])
        return float(len(counts) ** 2 / (1 / counts).sum())

    def promise(self, coverage: float) -> str:
        """What is promised, in words."""
        counts, number = np.array(self.counts), self.effective_number
        few, off = int((counts < FEW_OF_A_CLASS).sum()), 196 * np.sqrt(coverage * (1 - coverage) / number)
        text = (
            f"the sets contain the true class with {100 * coverage:g} % in the mean over classes; {counts.sum():,} "
            f"unseen samples, worth {number:,.0f} of equal classes, leave it uncertain by {off:.1f} points"
        )
        if not few:
            return text
        which = "every class" if few == len(counts) else f"{few:,} of {len(counts):,} classes"
        return f"{text}; nothing is promised for each class: {which} had fewer than {FEW_OF_A_CLASS} unseen samples"


def too_few_unseen() -> UserError:
    return UserError(
        f"prediction sets need {FEWEST_SAMPLES} unseen samples at least, and this classifier was fitted without them: "
        "fit it again with held-out samples"
    )
