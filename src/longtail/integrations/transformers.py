"""Hugging Face: a callback for the Trainer, and saving a model for `from_pretrained`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback

from longtail.errors import UserError
from longtail.integrations.training import Calibration


class CalibrateCallback(Calibration, TrainerCallback):
    """Scores by shots at every evaluation, a calibrated copy of the model (`model_`) when training ends.

    The scores are added to the Trainer's metrics (`eval_balanced`, `eval_few`, …), so that
    `metric_for_best_model="eval_balanced"` chooses by them. Each evaluation runs the model a second time.
    """

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **known: Any) -> None:
        """Log the scores of the evaluation images."""
        found = self.look(known["model"], known["eval_dataloader"], known["train_dataloader"])
        named = {f"eval_{name}": value for name, value in found.items()}
        metrics.update(named)
        state.log_history.append({**named, "epoch": state.epoch, "step": state.global_step})

    def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Calibrate with the training images."""
        self.finish(known["model"], known["train_dataloader"], known.get("eval_dataloader"))


def save_pretrained(model: PreTrainedModel, folder: Path | str) -> None:
    """Save a calibrated model as the Hub expects it (`config.json`, `model.safetensors`).

    The saved model is opened again as a check. If the head gained a bias that its configuration cannot store, the
    model is refused.
    """
    folder = Path(folder)
    if folder.exists():
        raise UserError(f"{folder} exists already; choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as beside:
        model.save_pretrained(beside)
        opened = type(model).from_pretrained(beside, dtype=model.dtype).state_dict()
        for name, value in model.state_dict().items():
            if name not in opened or not torch.equal(opened[name].cpu(), value.cpu()):
                raise UserError(
                    f"{type(model).__name__} cannot be restored from its configuration with {name}; save its weights "
                    "with torch.save, or train the model with a head that has a bias"
                )
        Path(beside).rename(folder)
        Path(beside).mkdir()  # for the context, which removes it
