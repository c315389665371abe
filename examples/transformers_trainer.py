"""Hugging Face's Trainer: a callback that calibrates at the end; a loss of longtail, by `compute_loss_func`.

A tiny vision transformer is built from its configuration: nothing is downloaded.

    python examples/transformers_trainer.py
"""

import tempfile

import torch
from datasets import Dataset
from transformers import PrinterCallback, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

import longtail
from longtail.integrations.transformers import CalibrateCallback, save_pretrained

data = longtail.data.open_splits("digits-lt")
counts = data.train.class_counts


def as_dataset(split) -> Dataset:
    images = (split.pixels / 255).numpy()
    return Dataset.from_dict({"pixel_values": images, "labels": split.labels.numpy()}).with_format("torch")


train, test = as_dataset(data.train), as_dataset(data.test)
loss = longtail.losses.BalancedSoftmax(counts)


def balanced_softmax(outputs, labels, num_items_in_batch=None) -> torch.Tensor:
    return loss(outputs.logits, labels)


def fit(compute_loss_func, *callbacks) -> ViTForImageClassification:
    set_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    config = ViTConfig(**small, image_size=8, patch_size=4, num_channels=1, num_labels=10)
    model = ViTForImageClassification(config)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=12,
        per_device_train_batch_size=32,
        learning_rate=5e-3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model, arguments, train_dataset=train, compute_loss_func=compute_loss_func, callbacks=list(callbacks)
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return model


def show(title: str, model: ViTForImageClassification) -> None:
    outputs = longtail.extract(model, test, class_counts=counts, split="test")  # a data set is taken as it is
    scores = longtail.evaluate(outputs.logits, outputs.labels, counts)
    print(f"{title}: balanced {100 * scores.balanced:.1f}, few-shot {100 * scores.few:.1f}")


callback = CalibrateCallback()
plain = fit(None, callback)
show("cross-entropy", plain)
show("cross-entropy, then MARC", callback.model_)

folder = tempfile.mkdtemp() + "/calibrated"  # config.json and model.safetensors, as the Hub expects them
save_pretrained(callback.model_, folder)
show("opened again", ViTForImageClassification.from_pretrained(folder))
show("Balanced Softmax", fit(balanced_softmax))
