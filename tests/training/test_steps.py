"""The schedule, batches, optimisers and steps of training beside naive formulas, and settings that cannot work."""

import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import longtail
from longtail.backbones import build_backbone
from longtail.data.loading import Sampler
from longtail.data.splits import open_splits
from longtail.distributed import SINGLE_PROCESS, World
from longtail.errors import UserError
from longtail.files.progress import QUIET
from longtail.methods import TRAIN_METHODS
from longtail.recipes import AUTHORS_SETTINGS, RECIPES, with_authors_settings
from longtail.training.journal import Journal
from longtail.training.plan import Plan
from longtail.training.setup import TrainingSetup, TrainingStep

PLAN = Plan(steps=40, batch_size=30, epoch_images=100, lr=0.4, warmup=4, warmup_from=0.1, streams=2)


def setup_of(config, world=SINGLE_PROCESS):
    return TrainingSetup(config, open_splits(config), world, QUIET)


def steps_of(setup):
    """The state after each step of a run, and the learning rate of the step."""
    setup.open_images()
    step = TrainingStep(setup.state.model, setup.state.objective)
    for batches in setup.batches(0, setup.plan.steps):
        setup.take_step(step, setup.state, batches)
        yield setup.state, setup.plan.learning_rate(setup.state.step - 1)


def values(module):
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def test_lengths_epochs_and_images():
    config = replace(RECIPES["digits-lt"], epochs=2.5, iterations=None, batch_size=64, lr=0.3, warmup=7)
    plan = Plan.of(config, 107, streams=3, stages=2)
    assert plan == Plan(math.ceil(2.5 * 107 / 64), 64, 107, 0.3, 7, config.warmup_from, 3, 2)
    assert Plan.of(replace(config, epochs=None, iterations=9), 107).steps == 9
    for step in range(41):
        assert PLAN.epochs_at(step) == pytest.approx(0.3 * step)
        assert (PLAN.epoch(step), PLAN.images_at(step)) == (math.floor(30 * step / 100), 60 * step)
    assert [PLAN.named(step) for step in (1, 4, 5, 40)] == ["epoch 1/12", "epoch 1/12", "epoch 2/12", "epoch 12/12"]
    for every in (1, 2, 5, 100):  # when the images seen pass a multiple of so many epochs, and after the last step
        passed = [step for step in range(40) if (step + 1) * 30 // (100 * every) > step * 30 // (100 * every)]
        assert [step for step in range(40) if PLAN.due(step, every)] == sorted({*passed, 39})


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_learning_rate_rises_and_falls_in_every_stage(stages):
    plan = replace(PLAN, stages=stages)
    for first, last in pairwise(math.ceil(stage * 40 / stages) for stage in range(stages + 1)):
        for step in range(first, last):
            done, length = step - first, last - first
            fallen = 0.4 * (1 + math.cos(math.pi * (done - 4) / (length - 4))) / 2
            assert plan.learning_rate(step) == pytest.approx(0.1 + 0.3 * (done + 1) / 4 if done < 4 else fallen)
    only = Plan(steps=4, batch_size=1, epoch_images=1, lr=1.0, warmup=4)
    assert [only.learning_rate(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_processes_and_micro_batches_share_the_draws_of_a_step(short):
    def drawn(config, rank=0, ranks=1, first=0):
        setup = setup_of(config, World(rank, ranks, torch.device("cpu")))
        return [draw.indices.tolist() for draw in setup.draws(setup.samplers[0], first, 3)]

    config = replace(short, accumulate=2)
    whole, divided = drawn(short), [drawn(config, rank, 2) for rank in (0, 1)]
    assert [len(indices) for indices in divided[0]] == [4] * 6  # two micro-batches of each step
    for step in range(3):
        indices = [index for rank in (0, 1) for micro in (0, 1) for index in divided[rank][2 * step + micro]]
        assert sorted(indices) == sorted(whole[step])
    assert drawn(config, first=2) == drawn(config)[4:]


def test_a_step_is_that_of_sgd_with_momentum_and_weight_decay(short):
    """v = 0.9 v + g + decay w; w = w - lr v."""
    setup = setup_of(replace(short, iterations=2, momentum=0.9, weight_decay=0.05))
    weights = values(setup.state.model)
    velocity = {name: torch.zeros_like(value) for name, value in weights.items()}
    for state, rate in steps_of(setup):
        for name, value in state.model.named_parameters():
            velocity[name] = 0.9 * velocity[name] + value.grad + 0.05 * weights[name]
            weights[name] = weights[name] - rate * velocity[name]
            torch.testing.assert_close(value.detach(), weights[name], rtol=1e-5, atol=1e-7)


def test_adamw_decays_neither_biases_nor_norms(short):
    setup = setup_of(replace(short, iterations=3, optimizer="adamw", lr=0.01, weight_decay=0.5))
    weights = values(setup.state.model)
    assert any(value.ndim == 1 for value in weights.values())
    means, squares = ({name: torch.zeros_like(value) for name, value in weights.items()} for _ in range(2))
    for step, (state, rate) in enumerate(steps_of(setup), 1):
        for name, value in state.model.named_parameters():
            means[name] = 0.9 * means[name] + 0.1 * value.grad
            squares[name] = 0.999 * squares[name] + 0.001 * value.grad**2
            update = (means[name] / (1 - 0.9**step)) / ((squares[name] / (1 - 0.999**step)).sqrt() + 1e-8)
            weights[name] = weights[name] * (1 - rate * 0.5 * (value.ndim > 1)) - rate * update
            torch.testing.assert_close(value.detach(), weights[name], rtol=1e-4, atol=1e-6)


def test_a_clipped_gradient_keeps_its_direction(short):
    plain, clipped = (
        next(steps_of(setup_of(replace(short, clip_norm=most))))[0].parameters() for most in (None, 0.01)
    )  # the same weights and batch
    norm = torch.cat([value.grad.flatten() for value in plain.values()]).norm()
    assert norm > 0.01
    for name, value in plain.items():
        torch.testing.assert_close(clipped[name].grad, value.grad * 0.01 / norm, rtol=1e-3, atol=1e-8)


def test_the_average_follows_the_weights(short):
    expected = None
    for state, _ in steps_of(setup_of(replace(short, ema=0.7, iterations=4))):
        now = values(state.model)
        expected = now if expected is None else {name: 0.7 * expected[name] + 0.3 * now[name] for name in now}
        for name, value in values(state.result).items():
            torch.testing.assert_close(value, expected[name])
        for one, other in zip(state.result.buffers(), state.model.buffers(), strict=True):
            assert torch.equal(one, other)  # batch-norm statistics are copied


def test_micro_batches_add_up(short):
    """Without batch-norm in the way, accumulating gives the gradient of the whole batch."""
    states = []
    for accumulate in (1, 4):
        setup = setup_of(replace(short, iterations=1, momentum=0.0, lr=1.0, accumulate=accumulate))
        setup.state.model.eval()
        for module in setup.state.model.modules():
            module.train = lambda mode=True: None  # batch-norm keeps its statistics
        states.append(next(steps_of(setup))[0].model.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], msg=name, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("method", "streams"), [("softmax", 1), ("bbn", 2), ("hybrid-sc", 3)])
def test_every_stream_gives_a_full_batch(short, method, streams):
    setup = setup_of(replace(short, method=method))
    setup.open_images()
    batches = next(setup.batches(0, 1))[0]
    assert [len(batch.labels) for batch in batches] == [16] * streams
    assert setup.plan.images_at(10) == 10 * 16 * streams
    labels = setup.splits.train.labels.numpy()
    for batch, name in zip(batches, TRAIN_METHODS[method].samplers, strict=True):
        drawn = Sampler(labels, name, seed=0, epochs=setup.plan.epochs_at(10)).batch(0, 16).indices
        assert batch.indices.tolist() == drawn.tolist()


def test_stages_of_oltr_have_their_own_rates(short):
    setup = setup_of(replace(short, method="oltr"))
    for number, (state, _) in enumerate(steps_of(setup)):
        rate = {group["part"]: group["lr"] for group in state.optimizer.param_groups}
        cosine = 0.1 * (1 + math.cos(math.pi * (number % 5) / 5)) / 2  # anew after half of the steps
        slow = 1.0 if number < 5 else 0.1
        assert rate["head"] == rate["hallucinator"] == rate["selector"] == pytest.approx(cosine)
        assert rate["backbone"] == rate["attention"] == rate["centroids"] == pytest.approx(slow * cosine)
    assert setup.state.model.memory_on


def test_a_layer_of_oltr_follows_the_pooled_features(short):
    model = setup_of(replace(short, method="oltr", options={"layer": "20"})).state.model.eval()
    images = torch.randn(3, 1, 8, 8)
    expected = model.layer[0](model.backbone.feature_map(images).mean((2, 3))).clamp(min=0)
    torch.testing.assert_close(model.direct_features(images), expected)
    assert model.centroids.shape == (10, 20)


@pytest.mark.parametrize("memory", ["constant", "slowing"])
def test_the_average_of_causal_norm(short, memory):
    """mean = mu mean + mean of the batch, with mu 0.9 or 1 - 0.1 min(50 lr, 1) of the step."""
    setup = setup_of(replace(short, method="causal-norm", options={"memory": memory}, lr=0.02))
    seen, expected = [], torch.zeros(64, dtype=torch.float64)
    setup.state.model.backbone.register_forward_hook(lambda *given: seen.append(given[2].detach().double()))
    for _, rate in steps_of(setup):
        mu = 0.9 if memory == "constant" else 1 - 0.1 * min(50 * rate, 1)
        expected = mu * expected + seen[-1].mean(0)
    torch.testing.assert_close(setup.state.model.mean_features.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        ({"accumulate": 3}, 1, "--batch-size 16 does not divide into 3 parts x 1 processes"),
        ({"accumulate": 2, "batch_size": 18}, 2, "18 does not divide into 2 parts x 2 processes"),
        ({"method": "bbn", "sampler": "instance"}, 1, r"its own samplers \(instance, reversed\); leave"),
        ({"batch_size": 4097}, 1, "a batch of 4,097 images; .* has [0-9]+$"),
        ({"batch_size": 4096}, 1, None),
        ({"sampler": "class-balanced"}, 1, None),
        ({"mix": "mixpu"}, 1, "unknown mix 'mixpu' .did you mean 'mixup'"),
        ({"optimizer": "adam"}, 1, "unknown optimizer 'adam'"),
        ({"mix_alpha": 0}, 1, "--mix-alpha must be a number, above 0"),
        ({"ema": 1}, 1, "--ema must be a number, above 0 and below 1, not 1"),
        ({"clip_norm": 0}, 1, "--clip-norm must be a number, above 0"),
        ({"defer": 160}, 1, "--defer must be a number, at least 0 and below 1, not 160"),
        ({"label_smoothing": 1}, 1, "--label-smoothing must be a number, at least 0 and below 1"),
        ({"epochs": 3}, 1, "either --epochs or --iterations"),
        ({"iterations": None}, 1, "either --epochs or --iterations"),
        ({"batch_size": 0}, 1, "--batch-size must be a whole number of at least 1, not 0"),
        ({"mean": (0.5,)}, 1, "mean and std are given together"),
        ({"mean": (0.5,), "std": (0,)}, 1, "std must be a number, above 0, not 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(short, settings, ranks, message):
    with pytest.raises(UserError, match=message) if message else nullcontext():
        setup_of(replace(short, **settings), World(ranks - 1, ranks, torch.device("cpu")))


def test_a_batch_that_does_not_fit_into_memory_is_named(short, monkeypatch):
    def full(*given):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(TrainingSetup, "take_step", full)
    setup = setup_of(replace(short, accumulate=2))
    setup.open_images()
    with pytest.raises(UserError, match=r"a batch of 16 images does not fit .* --accumulate 4 to split it"):
        setup.rehearse()


def test_a_process_that_cannot_see_the_folder_is_named(short, tmp_path):
    class Elsewhere(World):
        """Two processes on two machines."""

        def gather(self, value):
            return [True, False]

    journal = Journal(tmp_path / "run", short, open_splits(short), Elsewhere(1, 2, torch.device("cpu")))
    with pytest.raises(UserError, match="process 1 cannot see"):
        journal.require_usable(resume=False, overwrite=False)


def test_authors_settings_fit_their_methods_and_are_recorded(tmp_path, cifar_root):
    for data, methods in AUTHORS_SETTINGS.items():
        for method, settings in methods.items():
            assert with_authors_settings(replace(RECIPES["digits-lt"], data=data, method=method)).options == settings
            TRAIN_METHODS[method].build(build_backbone("digits", 1), torch.tensor([90, 9, 3]), settings)
    given = replace(RECIPES["cifar100-lt-100"], method="lade", options={"alpha": "0.3"})
    assert with_authors_settings(given).options == {"remine_lambda": "0.01", "alpha": "0.3"}
    config = replace(RECIPES["cifar10-lt-100"], method="causal-norm", backbone="resnet8", iterations=1, batch_size=8)
    longtail.train(replace(config, root=str(cifar_root / "python"), validation=0, device="cpu"), tmp_path / "run")
    assert longtail.Run.open(tmp_path / "run").config.options == {"alpha": "1"}
    places = replace(RECIPES["places-lt"], root=str(tmp_path), device="cpu")
    with pytest.warns(UserWarning, match="starts Places-LT from ImageNet weights"), pytest.raises(UserError):
        longtail.train(places, tmp_path / "places")
