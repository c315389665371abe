"""The table of scores: name, heading, whether lower is better, and how to print it.

Result tables, report, model card, journal and command line read it. To add a score, add a field to `Metrics`
and a line here.
"""

from __future__ import annotations

from dataclasses import dataclass

from longtail.files.text import percent

SHOTS = ("many", "medium", "few")


@dataclass(frozen=True)
class Score:
    """One number about a model.

    Args:
        name: key in files and attribute of `Metrics`.
        heading: its heading in tables.
        lower_is_better: True for errors.
        in_percent: whether it is a share that is printed in per cent; other numbers are printed unchanged.
    """

    name: str
    heading: str
    lower_is_better: bool = False
    in_percent: bool = True

    def scaled(self, value: float) -> float:
        """The number as it is printed, before rounding."""
        return 100 * value if self.in_percent else value

    @property
    def digits(self) -> int:
        """Digits after the decimal point."""
        return 1 if self.in_percent else 3

    def show(self, value: float | None) -> str:
        """The number as text.

        >>> SCORES["balanced"].show(0.8071), SCORES["nll"].show(0.61234), SCORES["few"].show(None)
        ('80.7', '0.612', 'none')
        """
        if self.in_percent or value is None:
            return percent(value)
        return f"{value:.{self.digits}f}"


SCORES: dict[str, Score] = {
    score.name: score
    for score in (
        *(Score(name, name.capitalize()) for name in SHOTS),
        Score("balanced", "Balanced accuracy"),
        Score("top1", "Top-1"),
        Score("natural", "Top-1 at training prior"),
        Score("macro_f1", "Macro F1"),
        Score("nll", "NLL", lower_is_better=True, in_percent=False),
        Score("brier", "Brier", lower_is_better=True, in_percent=False),
        Score("ece", "ECE", lower_is_better=True),
    )
}
# Of two classes only; the positive one is the rarer in training.
BINARY_SCORES: dict[str, Score] = {
    score.name: score
    for score in (
        Score("roc_auc", "ROC AUC", in_percent=False),
        Score("average_precision", "Average precision", in_percent=False),
        Score("precision", "Precision of the rarer class"),
        Score("flagged", "Predicted as the rarer class"),
    )
}
# The scores of a narrow table.
MAIN_SCORES = (*SHOTS, "balanced", "top1")
