"""What every network that changes more than the loss must do: any backbone, any size, save, resume, evaluate."""

import copy
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import longtail
from longtail.backbones import build_backbone
from longtail.backbones.weights import load_backbone
from longtail.data.loading import Batch
from longtail.distributed import SINGLE_PROCESS
from longtail.files.tensors import read_tensors
from longtail.heads.layers import head_of
from longtail.methods import TRAIN_METHODS
from longtail.metrics.scores import evaluate
from longtail.networks.objective import Progress
from longtail.recipes import RECIPES
from longtail.runs.folder import Run
from longtail.runs.score import score
from longtail.tasks.calibrate_run import calibrate_run
from longtail.tasks.evaluate import evaluate_run
from longtail.training.loop import Interrupted, StopRequest

COUNTS = torch.tensor([50, 20, 10, 4, 1])
# The authors' alpha for ten classes; prototypes as they use them there.
OPTIONS = {
    "bbn": {},
    "hybrid-sc": {},
    "hybrid-psc": {"variant": "psc", "temperature": "1"},
    "oltr": {},
    "causal-norm": {"alpha": "1"},
}
METHODS = {name: name.replace("psc", "sc") for name in OPTIONS}
FAMILIES = {"digits": (1, (8, 8)), "resnet8": (3, (19, 26)), "resnet10": (3, (65, 70)), "resnext50": (3, (33, 32))}


def build(name, backbone="digits", channels=1):
    torch.manual_seed(0)
    return TRAIN_METHODS[METHODS[name]].build(build_backbone(backbone, channels), COUNTS, OPTIONS[name])


def batches(name, channels=1, size=(8, 8), count=4):
    generator = torch.Generator().manual_seed(3)
    streams = TRAIN_METHODS[METHODS[name]].samplers
    labels = {sampler: torch.randint(5, (count,), generator=generator) for sampler in set(streams)}
    shape = (count, channels, *size)
    return [Batch(torch.randn(shape, generator=generator), labels[sampler], torch.arange(count)) for sampler in streams]


@pytest.mark.parametrize("backbone", FAMILIES)
@pytest.mark.parametrize("name", OPTIONS)
def test_works_on_every_family_of_backbones_and_odd_sizes(name, backbone):
    channels, size = FAMILIES[backbone]
    model, objective = build(name, backbone, channels)
    for step in (0, 5):  # both halves of a run
        loss = objective(model.train(), batches(name, channels, size), Progress(step, 10, step // 2, 5))
        loss.backward()
        assert loss.isfinite()
        # Processes that train together wait for a gradient of every parameter.
        for path, parameter in [*model.named_parameters(), *objective.named_parameters()]:
            assert parameter.grad is not None, path
            assert parameter.grad.isfinite().all(), path
            parameter.grad = None
    images = torch.randn(3, channels, *size)
    with torch.inference_mode():
        features, logits = model.eval().features(images), model(images)
        torch.testing.assert_close(head_of(model)(features), logits)
    assert logits.shape == (3, 5)
    assert features.ndim == 2


@pytest.mark.parametrize("name", OPTIONS)
def test_weights_come_back(name):
    model, objective = build(name)
    for step in (0, 5):
        objective(model, batches(name), Progress(step, 10, step // 2, 5)).backward()
    other, _ = build(name)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter)
    other.load_state_dict(model.state_dict())
    images = torch.randn(3, 1, 8, 8)
    for network in (other, copy.deepcopy(model)):
        assert torch.equal(network.eval()(images), model.eval()(images))


@pytest.mark.parametrize("name", OPTIONS)
def test_published_weights_go_into_the_backbone(name, tmp_path):
    source = build_backbone("resnet8")
    torch.save(source.state_dict(), tmp_path / "w.pth")
    model, _ = build(name, "resnet8", 3)
    load_backbone(model.get_submodule("backbone"), tmp_path / "w.pth")
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model.backbone.eval()(images), source.eval()(images))


@pytest.mark.parametrize("name", OPTIONS)
def test_the_trained_network_exports_for_any_number_of_images(name):
    model, objective = build(name)
    for step in (0, 5):
        objective(model, batches(name), Progress(step, 10, step // 2, 5))
    size = torch.export.Dim("images")
    program = torch.export.export(model.eval(), (torch.randn(4, 1, 8, 8),), dynamic_shapes=({0: size},))
    images = torch.randn(7, 1, 8, 8)
    torch.testing.assert_close(program.module()(images), model(images))


def config(name, **changes):
    return replace(RECIPES["digits-lt"], device="cpu", method=METHODS[name], options=OPTIONS[name], **changes)


SHORT = {"epochs": 4, "evaluate_every": 1, "checkpoint_every": 1}


def stop_after(monkeypatch, step):
    """Ask for a stop when that many steps were taken, as Ctrl-C would."""
    seen = {"steps": 0}

    def requested(self, world):
        seen["steps"] += 1
        return seen["steps"] == step

    monkeypatch.setattr(StopRequest, "requested", requested)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_interrupted_run_goes_on_bit_for_bit(name, tmp_path, monkeypatch):
    longtail.train(config(name, **SHORT), tmp_path / "whole")
    steps = json.loads((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    expected = read_tensors(tmp_path / "whole" / "model.safetensors")[0]
    for step in (3, steps // 2, steps - 2):  # before, at and after OLTR's switch
        folder = tmp_path / f"parts{step}"
        stop_after(monkeypatch, step)
        with pytest.raises(Interrupted):
            longtail.train(config(name, **SHORT), folder)
        monkeypatch.undo()
        longtail.train(config(name, **SHORT), folder, resume=True)
        reached = read_tensors(folder / "model.safetensors")[0]
        assert reached.keys() == expected.keys()
        for path, value in reached.items():
            assert torch.equal(value, expected[path]), path
        assert (folder / "metrics.jsonl").read_text().count("\n") == 4


@pytest.fixture(scope="module", params=list(OPTIONS))
def trained(request, tmp_path_factory):
    """A finished run of each method, long enough to have learnt."""
    folder = tmp_path_factory.mktemp("networks") / request.param
    # Contrasted pairs need more steps than the small recipe has.
    epochs = 100 if request.param == "hybrid-sc" else 40
    longtail.train(config(request.param, epochs=epochs, evaluate_every=epochs), folder)
    return request.param, folder


def test_it_learns_and_is_evaluated(trained):
    metrics, _, path = evaluate_run(trained[1], device="cpu")
    assert metrics.top1 > 0.6
    assert path.is_file()


def test_outputs_are_linear_in_the_features_and_can_be_calibrated(trained, tmp_path):
    shutil.copytree(trained[1], tmp_path / "run")
    run = Run.open(tmp_path / "run")
    outputs = run.outputs("test")
    again = torch.from_numpy(outputs.features[:]) @ torch.from_numpy(outputs.head_weight).T
    if outputs.head_bias is not None:
        again = again + torch.from_numpy(outputs.head_bias)
    torch.testing.assert_close(again, torch.from_numpy(outputs.logits[:]), rtol=1e-4, atol=1e-4)
    scored = score(run.model(), run.splits().test, run.transforms()[1], SINGLE_PROCESS, run.class_counts)
    assert evaluate(outputs.logits, outputs.labels, run.class_counts) == scored
    folder, scores = calibrate_run(run, longtail.MARC(), "marc")
    metrics, _, _ = evaluate_run(folder, device="cpu")
    after = next(score.after for score in scores if score.split == "test")
    assert metrics.top1 == pytest.approx(after.top1, abs=2 / 600)
    assert type(head_of(Run.open(folder).model())) is torch.nn.Linear


@pytest.mark.parametrize("change", [{"precision": "bf16"}, {"accumulate": 2}], ids=["bf16", "parts"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_step(name, change, tmp_path):
    metrics = longtail.train(config(name, epochs=2, **change), tmp_path / "run")
    assert metrics is not None


def test_a_compiled_network_learns(tmp_path, capsys):
    from longtail.files.progress import Display

    longtail.train(config("causal-norm", epochs=2, compile=True), tmp_path / "run", display=Display())
    assert "does not work here" not in capsys.readouterr().err
    assert Run.open(tmp_path / "run").model().mean_features.abs().max() > 0


TWO_PROCESSES = """
import json, sys
from pathlib import Path
from longtail.config import from_dict
from longtail.files.progress import Display
from longtail.training.loop import Trainer
from longtail.distributed import join

with join("cpu") as world:
    for folder, config in json.loads(sys.argv[1]).items():
        Trainer(from_dict(config), Path(folder), world, Display(quiet=True)).run()
"""


def test_two_processes_train_together(tmp_path):
    """Through both halves of OLTR, with the settings of DistributedDataParallel as they are."""
    from longtail.config import to_dict

    script = tmp_path / "script.py"
    script.write_text(TWO_PROCESSES)
    runs = {str(tmp_path / name): to_dict(config(name, epochs=2)) for name in OPTIONS}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, str(script), json.dumps(runs)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for folder in runs:
        weights = read_tensors(tmp_path / folder / "model.safetensors")[0]
        assert all(value.isfinite().all() for value in weights.values())
