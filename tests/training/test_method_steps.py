"""Steps of methods with streams, stages or an average of their own, beside a naive re-computation."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import longtail
from longtail.backbones import build_backbone
from longtail.data.samplers import Sampler
from longtail.distributed import SINGLE_PROCESS
from longtail.errors import UserError
from longtail.files.progress import QUIET
from longtail.methods import TRAIN_METHODS
from longtail.recipes import AUTHORS_SETTINGS, RECIPES, STAGE_TWO, with_authors_settings
from longtail.training.loop import Trainer, TrainingStep
from longtail.training.plan import Plan

SHORT = replace(RECIPES["digits-lt"], epochs=None, iterations=10, batch_size=16, warmup=0, device="cpu")


def trainer_of(tmp_path, method, **changes):
    return Trainer(replace(SHORT, method=method, **changes), tmp_path / method, SINGLE_PROCESS, QUIET)


@pytest.mark.parametrize(("method", "streams"), [("softmax", 1), ("bbn", 2), ("hybrid-sc", 3)])
def test_every_stream_gives_a_full_batch(tmp_path, method, streams):
    trainer = trainer_of(tmp_path, method)
    batches = next(trainer._batches())[0]
    assert [len(batch.labels) for batch in batches] == [16] * streams
    assert trainer.plan.steps == 10
    assert trainer.plan.images_at(10) == 10 * 16 * streams
    labels = trainer.splits.train.labels.numpy()
    for batch, name in zip(batches, TRAIN_METHODS[method].samplers, strict=True):
        drawn = Sampler(labels, name, seed=0, epochs=trainer.plan.epochs_at(10)).batch(0, 16).indices
        assert batch.indices.tolist() == drawn.tolist()


def test_stages_of_oltr_have_their_own_rates(tmp_path):
    trainer = trainer_of(tmp_path, "oltr")
    step = TrainingStep(trainer.state.model, trainer.state.objective)
    rates = []
    for batches in trainer._batches():
        trainer._step(step, batches)
        rates.append({group["part"]: group["lr"] for group in trainer.state.optimizer.param_groups})
    for number, rate in enumerate(rates):
        cosine = 0.1 * (1 + math.cos(math.pi * (number % 5) / 5)) / 2  # anew after half of the steps
        slow = 1.0 if number < 5 else 0.1
        assert rate["head"] == rate["hallucinator"] == rate["selector"] == pytest.approx(cosine)
        assert rate["backbone"] == rate["attention"] == rate["centroids"] == pytest.approx(slow * cosine)
    assert trainer.state.model.memory_on


def test_a_layer_of_oltr_follows_the_pooled_features(tmp_path):
    trainer = trainer_of(tmp_path, "oltr", options={"layer": "20"})
    model = trainer.state.model.eval()
    images = torch.randn(3, 1, 8, 8)
    expected = model.layer[0](model.backbone.feature_map(images).mean((2, 3))).clamp(min=0)
    torch.testing.assert_close(model.direct_features(images), expected)
    assert model.centroids.shape == (10, 20)


@pytest.mark.parametrize("memory", ["constant", "slowing"])
def test_the_average_of_causal_norm(tmp_path, memory):
    """mean = mu mean + mean of the batch, with mu 0.9 or 1 - 0.1 min(50 lr, 1) of the step."""
    trainer = trainer_of(tmp_path, "causal-norm", options={"memory": memory}, lr=0.02)
    model = trainer.state.model
    seen = []
    model.backbone.register_forward_hook(lambda module, inputs, output: seen.append(output.detach().double()))
    step = TrainingStep(model, trainer.state.objective)
    expected = torch.zeros(64, dtype=torch.float64)
    for number, batches in enumerate(trainer._batches()):
        trainer._step(step, batches)
        rate = 0.02 * (1 + math.cos(math.pi * number / 10)) / 2
        mu = 0.9 if memory == "constant" else 1 - 0.1 * min(50 * rate, 1)
        expected = mu * expected + seen[-1].mean(0)
    torch.testing.assert_close(model.mean_features.double(), expected, rtol=1e-4, atol=1e-5)


def test_recipes_carry_what_the_authors_use():
    for data, methods in AUTHORS_SETTINGS.items():
        for method, settings in methods.items():
            config = replace(RECIPES["digits-lt"], data=data, method=method)
            assert with_authors_settings(config).options == settings
            model, objective = TRAIN_METHODS[method].build(
                build_backbone("digits", 1), torch.tensor([90, 9, 3]), settings
            )
            assert model is not None
            assert objective is not None
    given = replace(RECIPES["cifar100-lt-100"], method="lade", options={"alpha": "0.3"})
    assert with_authors_settings(given).options == {"remine_lambda": "0.01", "alpha": "0.3"}


def test_a_run_records_the_settings_it_was_trained_with(tmp_path, cifar_root):
    config = replace(RECIPES["cifar10-lt-100"], method="causal-norm", backbone="resnet8", iterations=1, batch_size=8)
    longtail.train(replace(config, root=str(cifar_root / "python"), validation=0, device="cpu"), tmp_path / "run")
    assert longtail.Run.open(tmp_path / "run").config.options == {"alpha": "1"}


def test_the_releases_learning_rate():
    """0.05 to 0.1 in 800 steps, then a cosine from 0.1 to 0; the paper's: a cosine from 0.05."""
    release, paper = (Plan.of(RECIPES[f"cifar10-lt-100{name}"], 11_166) for name in ("-release", ""))
    assert release.steps == paper.steps == 13_000
    rates = [release.learning_rate(step) for step in (0, 399, 799, 800, 6_900, 12_999)]
    assert rates == pytest.approx([0.05 + 0.05 / 800, 0.075, 0.1, 0.1, 0.05, 0], abs=1e-6)
    assert [paper.learning_rate(step) for step in (0, 6_500, 12_999)] == pytest.approx([0.05, 0.025, 0], abs=1e-6)


def test_stage_two_of_the_paper():
    assert {name: (stage.batch_size, stage.weight_decay, stage.epochs) for name, stage in STAGE_TWO.items()} == {
        "imagenet-lt": (256, 5e-4, 10),
        "places-lt": (128, 5e-4, 10),
        "inaturalist18": (256, 1e-4, 30),
    }
    from longtail.methods import build_posthoc

    marc = build_posthoc("marc", {}, data="inaturalist18", train_images=437_513)
    assert (marc.ridge, marc.max_iter) == (1e-4, None)  # solved exactly: no steps
    sgd = build_posthoc("marc", {"solver": "sgd"}, data="inaturalist18", train_images=437_513)
    assert (sgd.ridge, sgd.batch_size, sgd.max_iter) == (1e-4, 256, 51_272)
    assert build_posthoc("marc", {"ridge": "3"}, data="inaturalist18", train_images=9).ridge == 3
    on_cifar = build_posthoc("marc", {"solver": "sgd"}, data="cifar10", train_images=11_166)
    assert on_cifar.get_params() == longtail.MARC(solver="sgd").get_params()


def test_the_schedule_of_the_release_in_stage_two():
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(3), [60, 20, 8])
    logits = rng.normal(size=(88, 3)) + 2 * np.eye(3)[y]
    paper, release = (longtail.MARC(solver="sgd", schedule=name).fit(logits, y) for name in ("paper", "release"))
    assert np.abs(paper.omega_ - release.omega_).max() > 1e-3
    np.testing.assert_allclose(paper.omega_, release.omega_, rtol=0.15)  # nearly the same problem solved


def test_places_without_weights_says_what_the_paper_does(tmp_path):
    with pytest.warns(UserWarning, match="starts Places-LT from ImageNet weights"), pytest.raises(UserError):
        longtail.train(replace(RECIPES["places-lt"], root=str(tmp_path), device="cpu"), tmp_path / "run")
