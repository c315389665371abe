"""Two processes have exactly the result of one, wherever the result is one."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from longtail import Outputs
from longtail.data.loading import SAMPLERS, Draw
from longtail.distributed import SINGLE_PROCESS
from longtail.files.progress import Display
from longtail.methods import build_posthoc
from longtail.recipes import RECIPES
from longtail.runs.folder import Run
from longtail.runs.network import write_outputs
from longtail.tasks.calibrate_run import calibrate_run
from longtail.tasks.evaluate import evaluate_run
from longtail.training.loop import Trainer

SHORT = replace(RECIPES["digits-lt"], epochs=None, iterations=4, warmup=0, device="cpu", evaluate_every=1000)


@pytest.fixture(scope="module")
def work(digits_run, torchrun, tmp_path_factory) -> Path:
    """The folder that two processes wrote."""
    out = tmp_path_factory.mktemp("together")
    shutil.copytree(digits_run, out / "digits")
    done = torchrun(Path(__file__).with_name("shared_work.py"), out / "digits", out)
    assert done.stdout == ""
    return out


@pytest.fixture(scope="module")
def alone(digits_run, tmp_path_factory) -> Path:
    """The same run, for one process to write into."""
    folder = tmp_path_factory.mktemp("alone") / "digits"
    shutil.copytree(digits_run, folder)
    return folder


def test_evaluation_is_that_of_one_process(work, alone):
    metrics, _, path = evaluate_run(alone, device="cpu")
    assert (work / "digits" / path.name).read_bytes() == path.read_bytes()
    seen = [json.loads((work / f"seen{rank}.json").read_text()) for rank in range(2)]
    assert seen[0] == seen[1]
    assert seen[0]["evaluate"] == metrics.to_dict()


def test_the_last_validation_is_that_of_the_saved_model(work):
    """Batch-norm statistics differ between processes while training: those of rank 0 count, in every part."""
    metrics, _, _ = evaluate_run(work / "plain", "validation", device="cpu")
    assert json.loads((work / "seen1.json").read_text())["train"] == metrics.to_dict()


def test_extracted_files_are_those_of_one_process(work, alone):
    run = Run.open(alone)
    write_outputs(run, "train", alone / "two.safetensors", views=2)
    write_outputs(run, "test", alone / "test.safetensors", dtype="float16", keep_logits=False)
    for name in ("two", "test"):
        assert (work / f"{name}.safetensors").read_bytes() == (alone / f"{name}.safetensors").read_bytes()
    outputs = Outputs.open(work / "two.safetensors")
    size = len(outputs) // 2
    assert outputs.indices.tolist() == [*range(size), *range(size)]
    assert not [*work.rglob("*.part*"), *work.rglob("*.shards")]


@pytest.mark.parametrize("name", ["marc", "crt", "tau-norm", "halo"])
def test_calibration_is_that_of_one_process(work, alone, name):
    method = build_posthoc(name, {})
    calibrate_run(Run.open(alone), method, name)
    one, two = (json.loads((folder / name / "calibration.json").read_text()) for folder in (alone, work))
    for key in ("scale_", "shift_", "omega_", "beta_"):
        if key in one:
            np.testing.assert_allclose(two[key], one[key], atol=1e-6, rtol=0)
    models = [Run.open(folder / name).model().state_dict() for folder in (alone, work)]
    for key, value in models[0].items():
        torch.testing.assert_close(models[1][key], value, atol=1e-6, rtol=0)


def of_both(folder: Path) -> list[dict]:
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def all_draws(trainer: Trainer) -> list[Draw]:
    """Every draw of the first stream."""
    return list(trainer.setup.draws(trainer.setup.samplers[0], 0, trainer.plan.steps))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_processes_share_every_sampler(work, tmp_path, sampler):
    """The batch is global: both parts in order are the batch of one process, and the weights stay equal."""
    trainer = Trainer(replace(SHORT, sampler=sampler), tmp_path / "run", SINGLE_PROCESS, Display(quiet=True))
    whole = [draw.indices.tolist() for draw in all_draws(trainer)]
    both = of_both(work / sampler)
    assert [a + b for a, b in zip(both[0]["draws"], both[1]["draws"], strict=True)] == whole
    assert {len(part) for part in both[0]["draws"]} == {SHORT.batch_size // 2}
    same_parameters(both, work / sampler)
    run = Run.open(work / sampler)
    assert run.config.batch_size == SHORT.batch_size


def same_parameters(both: list[dict], folder: Path) -> None:
    saved = Run.open(folder).model()
    for name, value in saved.named_parameters():
        for one in both:
            assert torch.equal(one["state"][name], value), name


@pytest.mark.parametrize(
    ("method", "summed"),
    [
        ("seesaw", ["loss.seen_counts"]),
        ("causal-norm", ["mean_features"]),
        ("oltr", ["class_means.sums", "centroids"]),
        ("bbn", []),
        ("hybrid-sc", []),
    ],
)
def test_what_accumulates_is_summed(work, tmp_path, method, summed):
    both = of_both(work / method)
    same_parameters(both, work / method)
    for name in summed:
        first, second = (one["state"][name] for one in both)
        assert torch.equal(first, second)
        assert first.abs().sum() > 0
    if method == "seesaw":
        labels = Run.open(work / method).splits.train.labels
        seen = torch.tensor(both[0]["draws"] + both[1]["draws"]).flatten()
        assert both[0]["state"]["loss.seen_counts"].tolist() == torch.bincount(labels[seen], minlength=10).tolist()


def test_parts_of_a_batch_over_processes(work, tmp_path):
    """Accumulation deals out the same global batch, in more parts."""
    both = of_both(work / "accumulate")
    assert {len(part) for part in both[0]["draws"]} == {SHORT.batch_size // 4}
    seen = sorted(index for one in both for part in one["draws"] for index in part)
    trainer = Trainer(SHORT, tmp_path / "run", SINGLE_PROCESS, Display(quiet=True))
    assert seen == sorted(index for draw in all_draws(trainer) for index in draw.indices)
    same_parameters(both, work / "accumulate")
