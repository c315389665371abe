"""Train the networks of the paper's table, one after another, at the lowest priority; it can be stopped at any time.

    python benchmarks/training_queue.py --root data --work ~/queue  # called again, it goes on
    python benchmarks/training_queue.py --work ~/queue --status     # what is done, and what it took
    python benchmarks/training_queue.py --work ~/queue --budget 200epochs  # on a slow machine: the shorter ones first

Two networks train at the same time, one thread each; the paper's own budget (13,000 steps of 512 images) comes first,
then 200 epochs. Each network is one call of `longtail train`, so an interrupted one resumes from its checkpoint. Start
the queue from an installed copy of the library, so that changes of the source do not disturb it.
`benchmarks/release.py` puts finished networks into released/.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class Job:
    """One network."""

    recipe: str
    budget: str
    method: str = "softmax"
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.recipe}-{self.budget}-{self.method}-seed{self.seed}"

    def arguments(self, folder: Path, root: str) -> list[str]:
        """Of `longtail`: a new run, or the one in the folder again."""
        settings = {"root": root, "method": self.method, "seed": str(self.seed), "device": "cpu"}
        settings |= PAPER if self.budget == "paper" else LONG
        again = ["--resume"] if (folder / "run.json").is_file() else []
        options = [word for name, value in settings.items() for word in (f"--{name}", value)]
        return ["train", self.recipe, "--out", str(folder), *options, *again]


def jobs(budget: str | None = None) -> list[Job]:
    """The networks in the order in which they are trained; `budget` puts those of one length first."""
    paper = [Job(recipe, "paper") for recipe in SETS]
    seeds = [Job(recipe, "200epochs", seed=seed) for seed in range(3) for recipe in SETS]
    methods = [
        Job(recipe, "200epochs", method) for recipe in ("cifar100-lt-100", "cifar10-lt-100") for method in STAGE_ONE
    ]
    return sorted([*paper, *seeds, *methods], key=lambda job: budget is not None and job.budget != budget)


def is_done(job: Job, work: Path) -> bool:
    return (work / job.name / "model.safetensors").is_file()


def train(job: Job, work: Path, root: str) -> None:
    """One network; returns when it is trained, or when its process has ended otherwise."""
    command = [sys.executable, __file__, "--child", *job.arguments(work / job.name, root)]
    with (work / f"{job.name}.log").open("ab") as log:
        code = subprocess.call(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    print(f"{job.name}: {'done' if is_done(job, work) else f'ended with exit code {code}'}", flush=True)


def child(arguments: list[str]) -> int:
    """One call of `longtail` at the lowest priority; its processor seconds are added up beside the run."""
    os.nice(19)
    from longtail.cli.main import main as longtail

    code = longtail(arguments)
    folder = Path(arguments[arguments.index("--out") + 1])
    spent = folder.with_suffix(".seconds.json")
    before = json.loads(spent.read_text()) if spent.is_file() else 0.0
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    spent.write_text(json.dumps(before + sum(own.ru_utime + own.ru_stime for own in used)))
    return code


def status(work: Path) -> None:
    for job in jobs():
        folder = work / job.name
        if not folder.is_dir():
            continue
        spent = folder.with_suffix(".seconds.json")
        hours = f"{json.loads(spent.read_text()) / 3600:.2f} processor hours" if spent.is_file() else "running"
        lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").is_file() else []
        step = json.loads(lines[-1]).get("step") if lines else 0
        print(f"{job.name}: {'done' if is_done(job, work) else f'step {step}'}, {hours}")


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="folder of CIFAR")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--budget", choices=("paper", "200epochs"), help="train the networks of this length first")
    parser.add_argument("--status", action="store_true", help="print what is done, train nothing")
    arguments = parser.parse_args()
    if arguments.status:
        status(arguments.work)
    else:
        arguments.work.mkdir(parents=True, exist_ok=True)
        waiting = [job for job in jobs(arguments.budget) if not is_done(job, arguments.work)]
        with ThreadPoolExecutor(max_workers=2) as two:
            list(two.map(lambda job: train(job, arguments.work, arguments.root), waiting))
    return 0


if __name__ == "__main__":
    sys.exit(main())
