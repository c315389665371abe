"""How training and the exact solver scale: with a second process, and with the size of the problem.

1. Two processes of one thread each beside one, in one launch and in turns: the same batches of ResNet-32 on
   CIFAR-10, the same passes of the exact solver, and the same whole solve. While one process works alone, the other
   waits. The limit, in the same turns: two processes that do half of the work each and exchange nothing, which is
   what the machine gives at best.
2. `exact` over two decades of N and of K, one thread: processor seconds against N x K on logarithmic scales.

Start it plainly; it starts torchrun by itself.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from common import cifar_root, seconds, write_results
from torch.nn.parallel import DistributedDataParallel

from longtail import MARC, Outputs
from longtail.data.imbalance import long_tail_counts
from longtail.distributed import SINGLE_PROCESS, World, join
from longtail.files.progress import Display
from longtail.posthoc.inputs import fit_outputs, from_outputs
from longtail.posthoc.marc import class_weights
from longtail.recipes import RECIPES
from longtail.training.loop import Trainer
from longtail.training.setup import TrainingStep

BATCH = 128
# Many short turns where that is possible: the speed of a virtual machine may change within seconds.
STEPS, PASSES, SOLVES = 61, 151, 31
DECADES = (2e6, 6e6, 2e7, 6e7, 2e8)


def training(folder: Path, root: str, world: World) -> list[dict[str, float]]:
    """Seconds of the same steps by one process, by all together, and by each apart from the others on its part."""
    # A small batch: above 32 MB per layer the allocator gives memory back to the system in every step, and halving
    # the batch alone would make a step more than twice as fast.
    config = replace(RECIPES["cifar10-lt-100"], root=root, device="cpu", epochs=90, iterations=None, batch_size=BATCH)
    given = {"all": (config, world), "apart": (replace(config, batch_size=BATCH // world.size), SINGLE_PROCESS)}
    if world.is_main:
        given["one"] = config, SINGLE_PROCESS
    loops = {}
    for name, (own, processes) in given.items():
        trainer = Trainer(own, folder / f"{name}{world.rank}", processes, Display(quiet=True))
        step = TrainingStep(trainer.state.model, trainer.state.objective)
        loops[name] = trainer, DistributedDataParallel(step) if processes.size > 1 else step, trainer._batches()

    def run(name: str) -> None:
        trainer, step, batches = loops[name]
        trainer._step(step, next(batches))

    return in_turns(run, world, STEPS)


def solving(folder: Path, world: World) -> dict[str, list[dict[str, float]]]:
    """Seconds of the same pass and of the same solve by one process, by all together, and by each over its own rows."""
    path = folder / "solve.safetensors"
    if world.is_main:
        outputs_of(115_846, 1000).save(path)  # the size of ImageNet-LT
    world.barrier()
    whole = Outputs.open(path)
    assert whole.logits is not None
    own = slice(world.rank, None, world.size)
    part = Outputs(whole.labels[own], whole.class_counts, logits=np.array(whole.logits[own]))
    given = {"one": (whole, SINGLE_PROCESS), "all": (whole, world), "apart": (part, SINGLE_PROCESS)}
    weights = torch.from_numpy(class_weights(whole.class_counts, 1.2))
    problems = {name: MARC().problem(from_outputs(*shared), weights) for name, shared in given.items()}
    identity = np.repeat([1.0, 0.0], len(weights))

    def run_pass(name: str) -> None:
        problems[name].value_and_gradient(identity)

    def run_solve(name: str) -> None:
        outputs, processes = given[name]
        fit_outputs(MARC(), outputs, None, processes)

    evaluations = MARC().fit(whole).result_.iterations / MARC().fit(part).result_.iterations
    solves = [{**times, "apart": evaluations * times["apart"]} for times in in_turns(run_solve, world, SOLVES)]
    return {"solving, its passes": in_turns(run_pass, world, PASSES), "solving, whole": solves}


def outside_passes(outputs: Outputs) -> float:
    """The share of a solve's time that is not spent in passes over the data."""
    profile = cProfile.Profile()
    profile.runcall(MARC().fit, outputs)
    stats = pstats.Stats(profile)
    inside = sum(row[3] for (_, _, name), row in stats.stats.items() if name == "_pass")
    return 1 - inside / stats.total_tt


def in_turns(run: Callable[[str], None], world: World, rounds: int) -> list[dict[str, float]]:
    """Seconds of `run(name)` for one, all and apart, taken in turns after a first round that does not count.

    What is for one runs in the first process only.
    """

    def turn(name: str) -> None:
        if name != "one" or world.is_main:
            run(name)
        world.barrier()

    taken = []
    for _ in range(rounds + 1):
        times = {}
        for name in ("one", "all", "apart"):
            world.barrier()
            times[name] = seconds(lambda name=name: turn(name))
        taken.append(times)
    return taken[1:]


def outputs_of(samples: int, classes: int) -> Outputs:
    """Logits of a biased classifier on a long tail of imbalance 100."""
    generator = torch.Generator().manual_seed(0)
    shape = long_tail_counts(classes, 100_000, 100, "exp")
    counts = np.maximum(np.round(shape / shape.sum() * samples), 2).astype(np.int64)
    labels = np.repeat(np.arange(classes), counts)
    means = torch.randn(classes, 32, generator=generator)
    features = 0.8 * means[labels] + torch.randn(len(labels), 32, generator=generator)
    bias = 0.3 * torch.from_numpy(np.log(counts / counts.mean())).float()
    logits = torch.nn.functional.linear(features, 0.4 * means, bias).numpy()
    return Outputs(labels, counts, logits=logits)


def growth() -> list[dict[str, float]]:
    """Processor seconds of `exact` on one thread where N or K grows."""
    points = []
    for varied in ("N", "K"):
        for size in DECADES:
            samples, classes = (int(size / 100), 100) if varied == "N" else (200_000, int(size / 200_000))
            outputs = outputs_of(samples, classes)
            taken = []
            for _ in range(3 if size < 5e7 else 1):
                began = time.process_time()
                passes = MARC().fit(outputs).result_.iterations
                taken.append(time.process_time() - began)
            cost = statistics.median(taken)
            points.append({"varied": varied, "N": len(outputs), "K": classes, "seconds": cost, "passes": passes})
    return points


def slope(points: list[dict[str, float]]) -> float:
    sizes = np.log([point["N"] * point["K"] for point in points])
    return float(np.polyfit(sizes, np.log([point["seconds"] for point in points]), 1)[0])


def child(folder: Path, root: str) -> None:
    """What the processes measure together, written by the first."""
    warnings.filterwarnings("ignore", message=".*lr_scheduler.*")
    torch.set_num_threads(1)
    with join("cpu") as world:
        results = {"training": training(folder, root, world), **solving(folder, world)}
        if world.is_main:
            (folder / "results.json").write_text(json.dumps(results))


def report(together: dict[str, list[dict[str, float]]], points: list[dict[str, float]]) -> None:
    rows: list[dict[str, object]] = []
    for name, taken in together.items():
        for two, what, asked in (
            ("all", "two processes / one", "≥ 1.7 x"),
            ("apart", "limit, two that exchange nothing / one", ""),
        ):
            lower, middle, upper = statistics.quantiles([times["one"] / times[two] for times in taken], n=4)
            rows.append(
                {
                    "what": f"{name}: {what}",
                    "measured": middle,
                    "asked for": asked,
                    "lower quartile": lower,
                    "upper quartile": upper,
                    "rounds": len(taken),
                    "one, s": statistics.median(times["one"] for times in taken),
                    "two, s": statistics.median(times[two] for times in taken),
                }
            )
    share = outside_passes(outputs_of(115_846, 1000))
    rows.append({"what": "solving: share of a solve that is not passes over the data", "measured": share})
    for varied in ("N", "K"):
        own = [point for point in points if point["varied"] == varied]
        rows.append({"what": f"exact, slope over {varied}", "measured": slope(own), "asked for": "≤ 1.1"})
    rows.append({"what": "exact, slope over N x K, all points", "measured": slope(points), "asked for": "≤ 1.1"})
    for point in points:
        what = f"exact, N {point['N']:,}, K {point['K']:,}: processor seconds ({point['passes']} passes)"
        rows.append({"what": what, "measured": point["seconds"]})
    write_results(
        "scaling",
        "How training and the exact solver scale",
        rows,
        "All processes have one thread. Ratios of speed: medians over rounds in which one and two take turns.",
        load=" ".join(f"{value:.1f}" for value in os.getloadavg()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder of CIFAR-10 (default: unpacked below benchmarks/.data)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    root = arguments.root or str(cifar_root())
    if arguments.child:
        child(arguments.child, root)
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*start, "--child", folder, "--root", root], check=True, env=environment)
        together = json.loads((Path(folder) / "results.json").read_text())
    report(together, growth())


if __name__ == "__main__":
    main()
