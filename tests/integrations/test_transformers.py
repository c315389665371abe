"""The real Trainer of transformers, on a network made from its configuration."""

import sys

import pytest
import torch

import longtail
from longtail.errors import UserError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")
huggingface_hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
integration = pytest.importorskip("longtail.integrations.transformers")

X = torch.randn(90, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0] * 50 + [1] * 25 + [2] * 15)
X += Y.view(-1, 1, 1, 1) / 2


def vit():
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(**small, image_size=8, patch_size=4, num_channels=1, num_labels=3)
    return transformers.ViTForImageClassification(config)


def rows(part):
    return datasets.Dataset.from_dict({"pixel_values": X[part].numpy(), "labels": Y[part].numpy()}).with_format("torch")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    callback = integration.CalibrateCallback()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path_factory.mktemp("trainer")),
        num_train_epochs=2,
        per_device_train_batch_size=16,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    train, held_out = rows(slice(0, None, 2)), rows(slice(1, None, 2))
    trainer = transformers.Trainer(vit(), arguments, train_dataset=train, eval_dataset=held_out, callbacks=[callback])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer, callback, train, held_out


def test_evaluations_score_by_shots(trained):
    trainer, callback, _, held_out = trained
    logged = [entry["eval_balanced"] for entry in trainer.state.log_history if "eval_balanced" in entry]
    assert logged == [found["balanced"] for found in callback.history_]
    assert len(logged) == 2
    outputs = longtail.extract(trainer.model, held_out, class_counts=[25, 13, 7], split="validation", device="cpu")
    scores = longtail.evaluate(outputs.logits, outputs.labels, [25, 13, 7])
    assert callback.history_[-1]["few"] == scores.few
    assert callback.history_[-1]["balanced"] == scores.balanced
    assert {"eval_balanced", "eval_medium", "eval_few", "eval_margin_correlation"} <= set(trainer.evaluate())


def test_the_end_of_training_is_calibrated(trained):
    trainer, callback, train, _ = trained
    _, expected = longtail.calibrate(trainer.model, train, device="cpu")
    torch.testing.assert_close(torch.as_tensor(callback.method_.scale_), torch.as_tensor(expected.scale_))
    assert callback.after_.balanced >= callback.before_.balanced
    with torch.inference_mode():
        old, new = (model.eval()(pixel_values=X).logits for model in (trainer.model, callback.model_))
    torch.testing.assert_close(new, callback.method_.transform(old), rtol=1e-4, atol=1e-4)
    assert (new - old).abs().max() > 0.1


def test_what_is_saved_is_opened_again(trained, tmp_path):
    callback = trained[1]
    words = {"license": "mit", "datasets": ["user/made-up"], "scores": callback.after_}
    integration.save_pretrained(callback.model_, tmp_path / "calibrated", **words)
    again = transformers.ViTForImageClassification.from_pretrained(tmp_path / "calibrated")
    with torch.inference_mode():
        assert torch.equal(again(X).logits, callback.model_.eval()(X).logits)
    assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "calibrated").iterdir()}
    with pytest.raises(UserError, match="calibrated exists already"):
        integration.save_pretrained(callback.model_, tmp_path / "calibrated")
    card = huggingface_hub.ModelCard.load(tmp_path / "calibrated" / "README.md")
    assert (card.data.license, card.data.datasets) == ("mit", ["user/made-up"])
    assert (card.data.library_name, card.data.model_name) == ("transformers", "calibrated")
    measured = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert measured["Balanced accuracy"] == pytest.approx(callback.after_.balanced, abs=1e-6)
    assert measured["Top-1"] == pytest.approx(callback.after_.top1, abs=1e-6)
    assert "Many" not in measured  # no class has so many images
    result = card.data.eval_results[0]
    assert (result.task_type, result.dataset_name, result.dataset_split) == (
        "image-classification",
        "user/made-up",
        "validation",
    )
    assert f"| Balanced accuracy | {100 * callback.after_.balanced:.1f} |" in card.text


def test_a_folder_is_uploaded(trained, tmp_path, monkeypatch):
    calls = []

    class Api:
        """Stands for the Hub, which no test reaches."""

        def __init__(self, token=None):
            calls.append(token)

        def create_repo(self, repo_id, **options):
            if repo_id == "no/access":
                raise OSError("403\nForbidden")
            calls.append((repo_id, options))

        def upload_folder(self, **options):
            calls.append(options)
            return "https://example.org/user/model"

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    with pytest.raises(UserError, match="has no README.md; write it with save_pretrained"):
        integration.push_to_hub(tmp_path, "user/model")
    integration.save_pretrained(trained[1].model_, tmp_path / "model")
    address = integration.push_to_hub(tmp_path / "model", "user/model", private=True)
    assert address == "https://example.org/user/model"
    assert calls[1] == ("user/model", {"private": True, "exist_ok": True})
    assert calls[2]["folder_path"] == tmp_path / "model"
    with pytest.raises(UserError, match="could not be uploaded to no/access: 403 Forbidden"):
        integration.push_to_hub(tmp_path / "model", "no/access")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"needs huggingface_hub: pip install 'longtail\[hf\]'"):
        integration.push_to_hub(tmp_path / "model", "user/model")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_bias_that_would_be_lost_is_refused(tmp_path):
    """The head of a Llama has none; its configuration makes it without."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.LlamaConfig(**small, vocab_size=20, pad_token_id=0, num_labels=3)
    torch.manual_seed(0)
    words = torch.randint(1, 20, (90, 6))
    model, _ = longtail.calibrate(
        transformers.LlamaForSequenceClassification(config), [{"input_ids": words, "labels": Y}], device="cpu"
    )
    with pytest.raises(UserError, match=r"cannot be restored from its configuration with score.bias"):
        integration.save_pretrained(model, tmp_path / "llama")
    assert list(tmp_path.iterdir()) == []


def test_unknown_counts_are_asked_for():
    callback = integration.CalibrateCallback()
    with pytest.raises(UserError, match="pass class_counts= to the callback"):
        callback.score(vit(), [(X, Y)], [(X, Y)])
    counted = integration.CalibrateCallback(class_counts=[50, 25, 15])
    assert set(counted.score(vit(), [(X, Y)], [(X, Y)])) == {"balanced", "medium", "few", "margin_correlation"}
