"""The real Trainer of Lightning."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import longtail

lightning = pytest.importorskip("lightning", reason="lightning is not installed")
integration = pytest.importorskip("longtail.integrations.lightning")

X = torch.randn(90, 6, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0] * 50 + [1] * 25 + [2] * 15)
X += Y.unsqueeze(1) / 2


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Linear(6, 3)

    def forward(self, x):
        return self.network(x)

    def training_step(self, batch):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch):
        self.log("loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(part, **options):
    return DataLoader(TensorDataset(X[part], Y[part]), batch_size=16, **options)


def fit(callback, folder, *validation):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        max_epochs=2,
        callbacks=[callback],
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, loader(slice(0, None, 2), shuffle=True), *validation)
    return trainer, module


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")  # Lightning's
def test_validations_score_by_shots_and_the_end_is_calibrated(tmp_path):
    callback = integration.CalibrateCallback()
    held_out = loader(slice(1, None, 2))
    trainer, module = fit(callback, tmp_path, held_out)
    assert len(callback.history_) == 2  # not the sanity check
    outputs = longtail.extract(module, held_out, class_counts=[25, 13, 7], split="validation", device="cpu")
    scores = longtail.evaluate(outputs.logits, outputs.labels, [25, 13, 7])
    assert callback.history_[-1]["balanced"] == scores.balanced == callback.before_.balanced
    assert float(trainer.callback_metrics["longtail/few"]) == pytest.approx(scores.few)
    _, expected = longtail.calibrate(module, loader(slice(0, None, 2)), device="cpu")
    torch.testing.assert_close(torch.as_tensor(callback.method_.scale_), torch.as_tensor(expected.scale_))
    assert isinstance(callback.model_, Module)
    with torch.inference_mode():
        old, new = module(X), callback.model_(X)
    torch.testing.assert_close(new, callback.method_.transform(old), rtol=1e-4, atol=1e-4)
    assert callback.after_.few > callback.before_.few


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_without_validation_images(tmp_path):
    callback = integration.CalibrateCallback(longtail.posthoc.LogitAdjustment())
    fit(callback, tmp_path)
    assert callback.history_ == []
    assert callback.before_ is None
    assert isinstance(callback.method_, longtail.posthoc.LogitAdjustment)
