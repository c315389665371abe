"""Lightning: a callback that scores by shots at every validation and calibrates at the end; a loss of longtail.

The class counts of a loss are buffers, so they follow the module's device.

    python examples/lightning_module.py
"""

import logging
import tempfile
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import longtail
from longtail.integrations.lightning import CalibrateCallback

data = longtail.data.open_splits("digits-lt")
counts = data.train.class_counts


class Digits(lightning.LightningModule):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.loss = loss

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return self.loss(self(images), labels)

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        images, labels = batch
        self.log("validation loss", nn.functional.cross_entropy(self(images), labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader_of(split, **options) -> DataLoader:
    return DataLoader(TensorDataset(split.pixels / 255, split.labels), batch_size=64, **options)


def fit(loss: nn.Module, *callbacks: lightning.Callback) -> Digits:
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=10,
        callbacks=list(callbacks),
        accelerator="cpu",
        devices=1,
        default_root_dir=tempfile.mkdtemp(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Digits(loss)
    trainer.fit(module, loader_of(data.train, shuffle=True), loader_of(data.validation))
    return module


def show(title: str, module: nn.Module) -> None:
    with torch.inference_mode():
        logits = module.eval()(data.test.pixels / 255)
    scores = longtail.evaluate(logits, data.test.labels, counts)
    print(f"{title}: balanced {100 * scores.balanced:.1f}, few-shot {100 * scores.few:.1f}")


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")  # advice on workers that a small example does not need

callback = CalibrateCallback()
plain = fit(nn.CrossEntropyLoss(), callback)
print("balanced accuracy by epoch:", [round(100 * found["balanced"], 1) for found in callback.history_])
show("cross-entropy", plain)
show("cross-entropy, then MARC", callback.model_)
show("Balanced Softmax", fit(longtail.losses.BalancedSoftmax(counts)))
