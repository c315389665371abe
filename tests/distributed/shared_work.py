"""What two processes do together in one launch; run by torchrun, checked by `test_together.py`."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

import longtail
from longtail.config import TrainConfig
from longtail.data.loading import SAMPLERS
from longtail.distributed import join
from longtail.files.progress import Display
from longtail.methods import build_posthoc
from longtail.recipes import RECIPES
from longtail.runs.folder import Run
from longtail.runs.network import write_outputs
from longtail.tasks.calibrate_run import calibrate_run
from longtail.tasks.evaluate import evaluate_run
from longtail.training.loop import Trainer

SHORT = replace(RECIPES["digits-lt"], epochs=None, iterations=4, warmup=0, device="cpu", evaluate_every=1000)
METHODS = ("seesaw", "causal-norm", "oltr", "bbn", "hybrid-sc")
POSTHOC = ("marc", "crt", "tau-norm", "halo", "probe")


def record(config: TrainConfig, folder: Path) -> None:
    """Train, and keep what each process saw and holds at the end."""
    with join("cpu") as world:
        trainer = Trainer(config, folder, world, Display(quiet=True))
        setup, steps = trainer.setup, trainer.plan.steps
        draws = [draw.indices.tolist() for sampler in setup.samplers for draw in setup.draws(sampler, 0, steps)]
        trainer.run()
        state = {**trainer.state.model.state_dict(), **trainer.state.objective.state_dict()}
        torch.save({"draws": draws, "state": state}, folder / f"rank{world.rank}.pt")


def main(run_folder: Path, out: Path) -> None:
    run = Run.open(run_folder)
    metrics, _, _ = evaluate_run(run_folder, device="cpu")
    with join("cpu") as world:
        write_outputs(run.using(world), "train", out / "two.safetensors", views=2)
        write_outputs(run.using(world), "test", out / "test.safetensors", dtype="float16", keep_logits=False)
        run.using(world).outputs("train", views=1)
        for name in POSTHOC:
            calibrate_run(run.using(world), build_posthoc(name, {}), name, out=out / name)
        rank = world.rank
    for sampler in SAMPLERS:
        record(replace(SHORT, sampler=sampler), out / sampler)
    for method in METHODS:
        record(replace(SHORT, method=method), out / method)
    record(replace(SHORT, accumulate=2), out / "accumulate")
    last = longtail.train(replace(SHORT, evaluate_every=1), out / "plain")
    assert last is not None
    (out / f"seen{rank}.json").write_text(json.dumps({"evaluate": metrics.to_dict(), "train": last.to_dict()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
