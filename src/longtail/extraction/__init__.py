"""Running a frozen model once over a split: anybody's model, or that of a run."""
