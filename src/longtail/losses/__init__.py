"""Losses for long-tailed data: plain modules for any training loop.

`Loss(class_counts, *, …)`, called as `loss(logits, target)`; `Focal` and `SupCon` need no counts.
"""

from longtail.losses.balanced_softmax import BalancedSoftmax
from longtail.losses.class_balanced import ClassBalanced
from longtail.losses.equalization import Equalization
from longtail.losses.focal import Focal
from longtail.losses.lade import LADE
from longtail.losses.ldam import LDAM
from longtail.losses.logit_adjusted import LogitAdjusted
from longtail.losses.multilabel import ClassBalancedBCE
from longtail.losses.seesaw import Seesaw
from longtail.losses.supcon import SupCon
from longtail.losses.weighted import WeightedCrossEntropy

__all__ = [
    "LADE",
    "LDAM",
    "BalancedSoftmax",
    "ClassBalanced",
    "ClassBalancedBCE",
    "Equalization",
    "Focal",
    "LogitAdjusted",
    "Seesaw",
    "SupCon",
    "WeightedCrossEntropy",
]
