"""Train the networks of the paper's table, one after another, at the lowest priority; it can be stopped at any time.

    python benchmarks/training_queue.py --root data --work ~/queue  # called again, it goes on
    python benchmarks/training_queue.py --work ~/queue --status     # what is done, and what it took
    python benchmarks/training_queue.py --work ~/queue --first 200epochs  # on a slow machine: the shorter ones first
    python benchmarks/training_queue.py --work ~/queue --keep       # copy unfinished runs into benchmarks/unfinished

Two networks train at the same time, one thread each; the paper's own budget (13,000 steps of 512 images) comes first,
then 200 epochs. Each network is one call of `longtail train`, so an interrupted one resumes from its checkpoint. Start
the queue from an installed copy of the library, so that changes of the source do not disturb it.

A network takes hours, and a machine may be gone before it is finished. So the checkpoints of unfinished runs are kept
in the repository (3.8 MB each): the queue continues them on any machine, two of them at the most.
`benchmarks/release.py` puts finished networks into released/; the queue does not train them again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

HERE = Path(__file__).resolve().parent
RELEASED = HERE.parent / "released"
UNFINISHED = HERE / "unfinished"
# What `longtail train --resume` needs of a run.
RUN_FILES = ("run.json", "checkpoint.safetensors", "metrics.jsonl")

SETS = ("cifar100-lt-100", "cifar10-lt-100", "cifar100-lt-200", "cifar10-lt-200")
# The rows of Table 2 that are trained from the start, then the library's other stage-one methods.
STAGE_ONE = (
    *("cbs", "cbw", "class-balanced", "focal", "lade", "ldam", "equalization", "balanced-softmax", "bbn", "hybrid-sc"),
    *("seesaw", "oltr", "causal-norm", "logit-adjusted"),
)
# The recipe as it is; 2 % of the images are held out, so that methods that need unseen images have some.
PAPER = {"precision": "bf16", "validation": "0.02", "evaluate-every": "20", "checkpoint-every": "2"}
# A third of the paper's images.
LONG = {
    "epochs": "200",
    "batch-size": "128",
    "lr": "0.1",
    "warmup": "450",
    "precision": "bf16",
    "evaluate-every": "20",
    "checkpoint-every": "2",
}
LENGTHS = {"paper": PAPER, "200epochs": LONG}
# Mixed images and deferred re-weighting (DRW), on the set that papers compare on.
OPTIONS = (
    ("softmax", {"mix": "mixup"}),
    ("softmax", {"defer": "0.8"}),
    ("balanced-softmax", {"mix": "mixup"}),
    ("ldam", {"defer": "0.8"}),
    ("softmax", {"mix": "cutmix"}),
    ("softmax", {"mix": "remix"}),
    ("softmax", {"mix": "mixup", "defer": "0.8"}),
)


@dataclass(frozen=True)
class Job:
    """One network."""

    recipe: str
    length: str
    method: str = "softmax"
    seed: int = 0
    options: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        options = "".join(f"-{name}-{value}" for name, value in self.options)
        return f"{self.recipe}-{self.length}-{self.method}{options}-seed{self.seed}"

    @property
    def released(self) -> str:
        """Its name below released/, as `benchmarks/release.py` gives it."""
        words = "".join(f"-{value if name == 'mix' else name}" for name, value in self.options)
        method = "" if self.method == "softmax" else f"-{self.method}"
        return f"{self.recipe}-resnet32{method}{words}-{self.length}-seed{self.seed}"

    def arguments(self, folder: Path, root: str) -> list[str]:
        """Of `longtail`: a new run, or the one in the folder again."""
        settings = {"root": root, "method": self.method, "seed": str(self.seed), "device": "cpu"}
        settings |= LENGTHS[self.length] | dict(self.options)
        again = ["--resume"] if (folder / "run.json").is_file() else []
        options = [word for name, value in settings.items() for word in (f"--{name}", value)]
        return ["train", self.recipe, "--out", str(folder), *options, *again]


def jobs(first: str | None = None) -> list[Job]:
    """The networks in the order in which they are trained; `first` puts those of one length before the others."""
    paper = [Job(recipe, "paper") for recipe in SETS]
    seeds = [Job(recipe, "200epochs", seed=seed) for seed in range(3) for recipe in SETS]
    mixed = [Job(SETS[0], "200epochs", method, options=tuple(options.items())) for method, options in OPTIONS]
    table7 = [Job("cifar100-lt-50", "200epochs")]  # stage one on less imbalanced data
    methods = [Job(recipe, "200epochs", method) for recipe in SETS[:2] for method in STAGE_ONE]
    # The learning rate of the released code: with the paper's own, Softmax is 3.2 and 5.8 points below the paper.
    released = [Job(f"{recipe}-release", "paper") for recipe in SETS[:2]]
    ordered = [*paper[:2], *released, *paper[2:], *seeds[:4], *mixed[:2], *seeds[4:], *table7, *methods, *mixed[2:]]
    return sorted(ordered, key=lambda job: first is not None and job.length != first)


def is_done(job: Job, work: Path) -> bool:
    """Trained here, or released; an earlier one of that name, on images drawn by the seed, does not count."""
    record = RELEASED / job.released / "run.json"
    is_released = record.is_file() and json.loads(record.read_text())["config"].get("subset") == "standard"
    return is_released or is_trained(job, work)


def is_trained(job: Job, work: Path) -> bool:
    return (work / job.name / "model.safetensors").is_file()


def keep(work: Path) -> None:
    """Copy the unfinished runs into the repository, without the paths of this machine, and drop those that are done."""
    for job in jobs():
        source, target = work / job.name, UNFINISHED / job.name
        if is_done(job, work):
            shutil.rmtree(target, ignore_errors=True)
        elif (source / "checkpoint.safetensors").is_file():
            target.mkdir(parents=True, exist_ok=True)
            for name in RUN_FILES:
                if (source / name).is_file():  # there are no metrics before the first evaluation
                    shutil.copyfile(source / name, target / name)
            record = json.loads((target / "run.json").read_text())
            record["config"]["root"] = "data"
            (target / "run.json").write_text(json.dumps(record, indent=1) + "\n")
            if (spent := source.with_suffix(".seconds.json")).is_file():
                shutil.copyfile(spent, target / "seconds.json")
            print(f"{job.name}: kept")


def restore(work: Path) -> None:
    """Put kept runs into the folder of the queue, unless it has them."""
    for source in sorted(UNFINISHED.glob("*/run.json")):
        target = work / source.parent.name
        if not target.exists():
            shutil.copytree(source.parent, target, ignore=shutil.ignore_patterns("seconds.json"))
            if (spent := source.parent / "seconds.json").is_file():
                shutil.copyfile(spent, target.with_suffix(".seconds.json"))


def started_first(job: Job, work: Path) -> bool:
    """Sorts runs with a checkpoint before new ones."""
    return not (work / job.name / "checkpoint.safetensors").is_file()


def train(job: Job, work: Path, root: str) -> None:
    """One network; returns when it is trained, or when its process has ended otherwise."""
    command = [sys.executable, __file__, "--child", *job.arguments(work / job.name, root)]
    with (work / f"{job.name}.log").open("ab") as log:
        code = subprocess.call(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    print(f"{job.name}: {'done' if is_done(job, work) else f'ended with exit code {code}'}", flush=True)


def child(arguments: list[str]) -> int:
    """One call of `longtail` at the lowest priority. What it took, and for how many steps, is added up beside the
    run: a call whose machine goes away leaves a checkpoint, but not what it took."""
    os.nice(19)
    from longtail.cli.main import main as longtail

    folder = Path(arguments[arguments.index("--out") + 1])
    start = steps_done(folder)
    code = longtail(arguments)
    path = folder.with_suffix(".seconds.json")
    spent = json.loads(path.read_text()) if path.is_file() else {"processor_seconds": 0.0, "steps": 0}
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    spent["processor_seconds"] += sum(own.ru_utime + own.ru_stime for own in used)
    spent["steps"] += steps_done(folder) - start
    path.write_text(json.dumps(spent))
    return code


def steps_done(folder: Path) -> int:
    """Of a finished run the last step, of an unfinished one the step of its checkpoint."""
    if (folder / "model.safetensors").is_file():
        return int(json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"])
    if not (folder / "checkpoint.safetensors").is_file():
        return 0
    with safe_open(folder / "checkpoint.safetensors", "numpy") as checkpoint:
        return int(json.loads(checkpoint.metadata()["longtail"])["step"])


def hours_of(spent: dict[str, float], steps: int) -> float:
    """Processor hours of a whole training, from those of the steps that were measured."""
    return spent["processor_seconds"] / 3600 * steps / spent["steps"]


def status(work: Path) -> None:
    for job in jobs():
        folder = work / job.name
        if not folder.is_dir():
            continue
        path, step = folder.with_suffix(".seconds.json"), steps_done(folder)
        hours = f"{hours_of(json.loads(path.read_text()), step):.2f} processor hours" if path.is_file() else "running"
        print(f"{job.name}: {'done' if is_done(job, work) else f'step {step}'}, {hours}")


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="folder of CIFAR")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--first", choices=tuple(LENGTHS), help="train the networks of this length first")
    parser.add_argument("--status", action="store_true", help="print what is done, train nothing")
    parser.add_argument("--keep", action="store_true", help="copy unfinished runs into benchmarks/unfinished")
    arguments = parser.parse_args()
    if arguments.status:
        status(arguments.work)
    elif arguments.keep:
        keep(arguments.work)
    else:
        arguments.work.mkdir(parents=True, exist_ok=True)
        restore(arguments.work)
        waiting = [job for job in jobs(arguments.first) if not is_done(job, arguments.work)]
        waiting.sort(key=lambda job: started_first(job, arguments.work))
        with ThreadPoolExecutor(max_workers=2) as two:
            list(two.map(lambda job: train(job, arguments.work, arguments.root), waiting))
    return 0


if __name__ == "__main__":
    sys.exit(main())
