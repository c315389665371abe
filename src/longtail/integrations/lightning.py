"""Lightning: scores by shots at every validation, a calibrated copy of the module at the end."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from longtail.integrations import Calibration


class CalibrateCallback(Calibration, Callback):
    """Logs `longtail/balanced`, `longtail/few`, … at every validation; `model_` is the calibrated module.

    `forward` of the module must give logits. Each validation runs the model a second time. The names can be
    monitored by other callbacks, such as `ModelCheckpoint(monitor="longtail/balanced")`.
    """

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the scores of the validation images."""
        if trainer.sanity_checking or trainer.train_dataloader is None:
            return
        scores = self.score(pl_module, _first(trainer.val_dataloaders), trainer.train_dataloader)
        pl_module.log_dict({f"longtail/{name}": value for name, value in scores.items()}, rank_zero_only=False)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Calibrate with the training images."""
        self.calibrate(pl_module, trainer.train_dataloader, _first(trainer.val_dataloaders))


def _first(loaders: Any) -> Any:
    """The first of several validation loaders; hyper-parameters are chosen on it."""
    return loaders[0] if isinstance(loaders, list | tuple) and loaders else loaders or None
