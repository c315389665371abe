"""Hugging Face: a callback for the Trainer, and saving a model for `from_pretrained` and the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback

from longtail.errors import UserError
from longtail.exports.card import CARD_FILE, front_matter, push_to_hub
from longtail.files.atomic import replacing_folder, write_text
from longtail.files.text import markdown_text
from longtail.integrations import Calibration
from longtail.metrics.scores import Metrics
from longtail.metrics.table import SCORES
from longtail.tasks.tables import markdown_table

__all__ = ["CalibrateCallback", "push_to_hub", "save_pretrained"]


class CalibrateCallback(Calibration, TrainerCallback):
    """Scores by shots at every evaluation, a calibrated copy of the model (`model_`) when training ends.

    The scores are added to the Trainer's metrics (`eval_balanced`, `eval_few`, …), so that
    `metric_for_best_model="eval_balanced"` chooses by them. Each evaluation runs the model a second time.
    """

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **objects: Any) -> None:
        """Log the scores of the evaluation images."""
        scores = self.score(objects["model"], objects["eval_dataloader"], objects["train_dataloader"])
        named = {f"eval_{name}": value for name, value in scores.items()}
        metrics.update(named)
        state.log_history.append({**named, "epoch": state.epoch, "step": state.global_step})

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Calibrate with the training images."""
        self.calibrate(objects["model"], objects["train_dataloader"], objects.get("eval_dataloader"))


def save_pretrained(
    model: PreTrainedModel,
    folder: Path | str,
    *,
    license: str | None = None,
    datasets: Sequence[str] = (),
    scores: Metrics | None = None,
    split: str = "validation",
) -> None:
    """Save a calibrated model as the Hub expects it: `config.json`, `model.safetensors` and a model card.

    The saved model is opened again as a check. If the head gained a bias that its configuration cannot store, the
    model is refused. `push_to_hub(folder, "user/name")` uploads the folder.

    Args:
        model: the calibrated model, such as `callback.model_`.
        folder: a new folder.
        license: identifier of the Hub for the card, such as mit.
        datasets: identifiers of the training data on the Hub.
        scores: measured on held-out images, such as `callback.after_`; they are written to the card.
        split: name of these held-out images.
    """
    folder = Path(folder)
    if folder.exists():
        raise UserError(f"{folder} exists already; choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing_folder(folder, (), "a model") as temporary:
        model.save_pretrained(temporary)
        opened = type(model).from_pretrained(temporary, dtype=model.dtype).state_dict()
        for name, value in model.state_dict().items():
            if name not in opened or not torch.equal(opened[name].cpu(), value.cpu()):
                raise UserError(
                    f"{type(model).__name__} cannot be restored from its configuration with {name}; save its weights "
                    "with torch.save, or train the model with a head that has a bias"
                )
        write_text(temporary / CARD_FILE, _card(type(model).__name__, folder.name, license, datasets, scores, split))


def _card(
    kind: str, name: str, license: str | None, datasets: Sequence[str], scores: Metrics | None, split: str
) -> str:
    """The model card: fields of the Hub, scores, how to load."""
    measured = {} if scores is None else {key: getattr(scores, key) for key in SCORES}
    results = [(split, measured)] if measured else []
    fields = front_matter(name, results, library="transformers", license=license, datasets=datasets)
    rows = [[SCORES[key].heading, SCORES[key].show(value)] for key, value in measured.items()]
    table = [*markdown_table([f"score, {markdown_text(split)} images", "value"], rows), ""] if rows else []
    load = ["```python", f"from transformers import {kind}", "", f'model = {kind}.from_pretrained(".")', "```"]
    title = f"# {markdown_text(name)}: {kind}, calibrated for long-tailed classes"
    return "\n".join([fields, "", title, "", *table, *load]) + "\n"
