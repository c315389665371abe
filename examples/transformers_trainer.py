"""Hugging Face's Trainer on text: a callback that scores and calibrates, and a loss by `compute_loss_func`.

The language of a name of a country or language has to be told from its letters: eight languages, 400 names of the first
down to 8 of the last. The names come with Babel (`pip install babel`); the tokenizer is trained on them and a small
DistilBERT is built from its configuration, so nothing is downloaded.

    python examples/transformers_trainer.py
"""

import tempfile
from collections import Counter

import numpy as np
import torch
from babel import Locale
from datasets import Dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    DataCollatorWithPadding,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

import longtail
from longtail.integrations.transformers import CalibrateCallback, save_pretrained

LANGUAGES = ("lt", "vi", "cs", "tr", "eu", "hu", "pl", "fi")
COUNTS = np.geomspace(400, 8, len(LANGUAGES)).round().astype(int)  # training names of each language


def names(code: str) -> set[str]:
    locale = Locale(code)
    return {name for name in (*locale.territories.values(), *locale.languages.values()) if len(name) > 3}


times = Counter(name for code in LANGUAGES for name in names(code))
rng = np.random.default_rng(0)
splits = {"train": [], "validation": [], "test": []}
for label, (code, count) in enumerate(zip(LANGUAGES, COUNTS, strict=True)):
    own = rng.permutation(sorted(name for name in names(code) if times[name] == 1)).tolist()
    held_out = -(-count // 4)  # names that the network does not see: as frequent as in training
    for split, chosen in (("train", own[:count]), ("validation", own[count:][:held_out]), ("test", own[-60:])):
        splits[split] += [(name, label) for name in chosen]

words = Tokenizer(models.BPE(unk_token="[UNK]"))
words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Metaspace()
words.train_from_iterator(
    [name for name, _ in splits["train"]],
    trainers.BpeTrainer(vocab_size=400, special_tokens=["[PAD]", "[UNK]", "[CLS]"], show_progress=False),
)
words.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


def as_dataset(split: str) -> Dataset:
    texts, labels = zip(*splits[split], strict=True)
    encoded = tokenizer(list(texts), truncation=True, max_length=32, return_token_type_ids=False)
    return Dataset.from_dict({**encoded, "labels": list(labels)})


train, validation, test = (as_dataset(split) for split in splits)
collate = DataCollatorWithPadding(tokenizer)
loss = longtail.losses.BalancedSoftmax(COUNTS)


def balanced_softmax(outputs, labels, num_items_in_batch=None) -> torch.Tensor:
    return loss(outputs.logits, labels)


def fit(compute_loss_func, *callbacks) -> DistilBertForSequenceClassification:
    set_seed(0)
    small = {"dim": 64, "n_layers": 1, "n_heads": 4, "hidden_dim": 128, "max_position_embeddings": 32}
    config = DistilBertConfig(**small, vocab_size=len(tokenizer), num_labels=len(LANGUAGES), pad_token_id=0)
    model = DistilBertForSequenceClassification(config)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=15,
        per_device_train_batch_size=64,
        learning_rate=3e-3,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model,
        arguments,
        data_collator=collate,
        train_dataset=train,
        eval_dataset=validation,
        compute_loss_func=compute_loss_func,
        callbacks=list(callbacks),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return model


def show(title: str, model: DistilBertForSequenceClassification) -> None:
    loader = torch.utils.data.DataLoader(test, 128, collate_fn=collate)
    outputs = longtail.extract(model, loader, class_counts=COUNTS, split="test")
    scores = longtail.evaluate(outputs.logits, outputs.labels, COUNTS)
    print(f"{title}: balanced {100 * scores.balanced:.1f}, few-shot {100 * scores.few:.1f}")


callback = CalibrateCallback(longtail.HALO())
show("cross-entropy", fit(None, callback))
show("cross-entropy, then HALO", callback.model_)

folder = tempfile.mkdtemp() + "/calibrated"  # config.json and model.safetensors, as the Hub expects them
save_pretrained(callback.model_, folder)
show("opened again", DistilBertForSequenceClassification.from_pretrained(folder))
show("Balanced Softmax", fit(balanced_softmax))
