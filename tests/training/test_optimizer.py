"""AdamW, clipping and the average of the weights beside their formulas; runs with them go on bit for bit."""

from dataclasses import replace

import pytest
import torch

import longtail
from longtail.config import from_dict, to_dict
from longtail.data.splits import open_splits
from longtail.distributed import SINGLE_PROCESS
from longtail.errors import UserError
from longtail.files.progress import QUIET
from longtail.files.tensors import read_tensors
from longtail.recipes import RECIPES
from longtail.runs.folder import Run
from longtail.tasks.evaluate import evaluate_run
from longtail.training.loop import Interrupted, StopRequest
from longtail.training.rehearsal import prepare
from longtail.training.step import TrainingStep, take_step

SHORT = replace(RECIPES["digits-lt"], epochs=None, iterations=10, batch_size=16, warmup=0, device="cpu")
ADAMW = {"optimizer": "adamw", "lr": 0.01}
NEW = ("mix", "mix_alpha", "label_smoothing", "defer", "optimizer", "clip_norm", "ema")


def steps_of(config, count):
    """The state after each of the first steps."""
    streams, state, plan = prepare(config, open_splits(config), SINGLE_PROCESS, QUIET)
    streams.open_images()
    step = TrainingStep(state.model, state.objective)
    for parts in streams.batches(0, count):
        take_step(step, state, parts, config, plan, SINGLE_PROCESS)
        yield state, plan.learning_rate(state.step - 1)


def values(module):
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def test_adamw_decays_neither_biases_nor_norms():
    config = replace(SHORT, **ADAMW, weight_decay=0.5)
    _, start, _ = prepare(config, open_splits(config), SINGLE_PROCESS, QUIET)
    weights = values(start.model)
    means, squares = ({name: torch.zeros_like(value) for name, value in weights.items()} for _ in range(2))
    undecayed = 0
    for step, (state, rate) in enumerate(steps_of(config, 3), 1):
        for name, value in state.model.named_parameters():
            means[name] = 0.9 * means[name] + 0.1 * value.grad
            squares[name] = 0.999 * squares[name] + 0.001 * value.grad**2
            decay = 0.5 if value.ndim > 1 else 0.0
            undecayed += value.ndim <= 1
            update = (means[name] / (1 - 0.9**step)) / ((squares[name] / (1 - 0.999**step)).sqrt() + 1e-8)
            weights[name] = weights[name] * (1 - rate * decay) - rate * update
            torch.testing.assert_close(value.detach(), weights[name], rtol=1e-4, atol=1e-6)
    assert undecayed > 0


def test_a_clipped_gradient_keeps_its_direction():
    plain, clipped = (
        next(steps_of(replace(SHORT, clip_norm=most), 1))[0].parameters() for most in (None, 0.01)
    )  # the same weights and batch
    norm = torch.cat([value.grad.flatten() for value in plain.values()]).norm()
    assert norm > 0.01
    for name, value in plain.items():
        torch.testing.assert_close(clipped[name].grad, value.grad * 0.01 / norm, rtol=1e-3, atol=1e-8)


def test_the_average_follows_the_weights():
    config = replace(SHORT, ema=0.7)
    expected = None
    for state, _ in steps_of(config, 4):
        now = values(state.model)
        expected = now if expected is None else {name: 0.7 * expected[name] + 0.3 * now[name] for name in now}
        for name, value in values(state.result).items():
            torch.testing.assert_close(value, expected[name])
        for one, other in zip(state.result.buffers(), state.model.buffers(), strict=True):
            assert torch.equal(one, other)  # batch-norm statistics are copied


def test_the_averaged_weights_are_scored_and_saved(tmp_path):
    config = replace(SHORT, epochs=3, iterations=None, evaluate_every=100)
    metrics = longtail.train(replace(config, ema=0.98), tmp_path / "average")
    longtail.train(config, tmp_path / "plain")
    average, plain = (read_tensors(tmp_path / name / "model.safetensors")[0] for name in ("average", "plain"))
    assert average.keys() == plain.keys()
    assert not torch.equal(average["head.weight"], plain["head.weight"])
    scored, _, _ = evaluate_run(tmp_path / "average", "validation", device="cpu")
    assert scored.confusion == metrics.confusion


@pytest.mark.parametrize(
    "settings",
    [
        {"mix": "mixup"},
        {"mix": "cutmix", "accumulate": 2, "method": "balanced-softmax"},
        {"mix": "remix", "label_smoothing": 0.1, "defer": 0.5},
        {**ADAMW, "ema": 0.9, "clip_norm": 1.0},
        {"ema": 0.9},
    ],
)
def test_a_run_goes_on_bit_for_bit(settings, tmp_path, monkeypatch):
    config = replace(SHORT, iterations=12, **settings)
    longtail.train(config, tmp_path / "whole")
    asked = iter(range(1, 100))
    monkeypatch.setattr(StopRequest, "requested", lambda self, world: next(asked) in (3, 8))
    for resume in (False, True):
        with pytest.raises(Interrupted):
            longtail.train(config, tmp_path / "parts", resume=resume)
    monkeypatch.undo()
    longtail.train(config, tmp_path / "parts", resume=True)
    whole, parts = (read_tensors(tmp_path / name / "model.safetensors")[0] for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_large_rate_for_adamw_is_mentioned(tmp_path):
    with pytest.warns(UserWarning, match="--lr 0.1 is large for AdamW; about 0.001 is usual"):
        longtail.train(replace(SHORT, optimizer="adamw", iterations=1), tmp_path / "run")


def test_runs_from_before_these_settings_open_and_resume_alike(tmp_path):
    older = {name: value for name, value in to_dict(SHORT).items() if name not in NEW}
    assert from_dict(older) == SHORT
    longtail.train(replace(SHORT, iterations=1, ema=0.5), tmp_path / "run")
    assert Run.open(tmp_path / "run").config.ema == 0.5
    with pytest.raises(UserError, match=r"another configuration \(ema: 0.5 → None\)"):
        longtail.train(replace(SHORT, iterations=1), tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mix": "mixpu"}, "unknown mix 'mixpu' .did you mean 'mixup'"),
        ({"optimizer": "adam"}, "unknown optimizer 'adam'"),
        ({"mix_alpha": 0}, "--mix-alpha must be a number, above 0"),
        ({"ema": 1}, "--ema must be a number, above 0 and below 1, not 1"),
        ({"clip_norm": 0}, "--clip-norm must be a number, above 0"),
        ({"defer": 160}, "--defer must be a number, at least 0 and below 1, not 160"),
        ({"label_smoothing": 1}, "--label-smoothing must be a number, at least 0 and below 1"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        replace(SHORT, **settings)
