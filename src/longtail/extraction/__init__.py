"""Runs a frozen model once over a split: any model, or the model of a run."""
