"""What two processes of somebody else's job do with longtail; run by torchrun, checked by `test_any_model.py`."""

import os
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset

import longtail
from longtail.distributed import group_of_caller
from longtail.errors import UserError
from longtail.outputs.gather import change_meeting, taking_part

SIZE = 101  # odd: the parts of two processes are uneven, and a distributed sampler pads


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(x))


class Branch(Net):
    """The last sample alone, which process 0 is shown, leaves early."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.early = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        odd = (x == samples()[0][-1]).all(1)
        return torch.where(odd.unsqueeze(1), self.early(x), super().forward(x))


def network() -> Net:
    torch.manual_seed(0)
    return Net()


def samples(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor([0] * 60 + [1] * 25 + [2] * 10 + [3] * 6)[torch.randperm(SIZE, generator=generator)]
    return torch.randn(SIZE, 6, generator=generator) + labels.unsqueeze(1), labels


def unseen() -> Subset:
    """Other samples, for what is chosen on held-out ones."""
    return Subset(TensorDataset(*samples(seed=2)), range(0, SIZE, 3))


def many_labels() -> TensorDataset:
    """The same samples with labels (N, 4) of 0 and 1: each class, and all classes below it."""
    x, y = samples()
    return TensorDataset(x, (y.unsqueeze(1) >= torch.arange(4)) & (x[:, :4] > -1))


class Stream(IterableDataset):
    """Each process reads every second sample."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self):
        x, y = samples()
        return iter(zip(x[self.rank :: 2], y[self.rank :: 2], strict=True))


class Noisy(TensorDataset):
    """Augments anew, and on each process in another way."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        generator = torch.Generator().manual_seed(SIZE * dist.get_rank() + index)
        return x + torch.randn(x.shape, generator=generator), y


def result(model, method=None):
    """What is compared between processes."""
    numbers = {name: torch.as_tensor(getattr(method, name)) for name in ("scale_", "shift_") if hasattr(method, name)}
    return {**numbers, **{name: value.detach().clone() for name, value in model.state_dict().items()}}


def refused(call):
    try:
        call()
    except UserError as error:
        return str(error)
    return None


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = TensorDataset(*samples())
    device = {"device": "cpu"}

    def shared(dataset=data, **options):
        return DataLoader(dataset, 8, sampler=DistributedSampler(dataset, **options))

    kept = {}
    plain = shared(shuffle=False)
    kept["sampler"] = result(*longtail.calibrate(DistributedDataParallel(network()), plain, **device))
    shuffled = shared(shuffle=True, seed=3)
    shuffled.sampler.set_epoch(2)
    kept["shuffled"] = result(*longtail.calibrate(network(), shuffled, **device))
    auto = longtail.MARC(gamma="auto")
    held_out = shared(unseen(), shuffle=False)
    kept["auto"] = result(*longtail.calibrate(network(), plain, auto, validation=held_out, **device))
    kept["crt"] = result(*longtail.calibrate(network(), plain, longtail.posthoc.CRT(ridge=0.01), **device))
    kept["disalign"] = result(*longtail.calibrate(network(), plain, longtail.posthoc.DisAlign(max_iter=5), **device))
    several = shared(many_labels(), shuffle=False), longtail.posthoc.MultiLabelCalibration()
    kept["several labels"] = result(*longtail.calibrate(network(), *several, **device))
    kept["whole"] = result(*longtail.calibrate(network(), DataLoader(data, 8, shuffle=True), **device))
    kept["list"] = result(*longtail.calibrate(network(), [samples()], **device))

    trained = DistributedDataParallel(network())
    statistics = trained.module.body[1].running_mean
    statistics += rank  # as after the last step of training
    mean = statistics.clone()
    kept["buffers"] = result(*longtail.calibrate(trained, plain, **device))
    kept["buffers after"] = bool(torch.equal(statistics, mean))
    other = network()
    with torch.no_grad():
        other.fc.bias += rank
    kept["weights"] = refused(lambda: longtail.calibrate(other, plain, **device))

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        parts = Subset(data, range(rank, SIZE, 2))
        kept["stream"] = result(*longtail.calibrate(network(), DataLoader(Stream(rank), 8), **device))
        kept["subset"] = result(*longtail.calibrate(network(), DataLoader(parts, 8), **device))
    kept["said"] = [str(one.message) for one in said if "shown" in str(one.message)]
    kept["augmented"] = refused(lambda: longtail.calibrate(network(), DataLoader(Noisy(*samples()), 8), **device))

    halves = samples()[1].float() + 0.5 * rank  # labels that only process 1 cannot take
    parts = [(samples()[0], halves.long() if rank == 0 else halves)]
    kept["labels of one"] = refused(lambda: longtail.calibrate(network(), parts, **device))
    kept["branch of one"] = refused(lambda: longtail.calibrate(Branch(), plain, **device))

    kept["outputs"] = vars(longtail.extract(network(), plain, **device)).copy()
    mapped = longtail.extract(network(), plain, out / "all.safetensors", **device)
    kept["mapped"] = {name: np.array(getattr(mapped, name)) for name in ("logits", "features", "labels", "indices")}

    os.environ["LONGTAIL_JOIN_TIMEOUT"] = "1"
    if rank == 0:
        kept["alone"] = result(*longtail.calibrate(network(), DataLoader(data, 8), **device))
        kept["here while alone"] = here_while_alone()
        kept["part alone"] = refused(lambda: longtail.calibrate(network(), plain, **device))
    dist.barrier()
    os.environ["LONGTAIL_JOIN_TIMEOUT"] = "300"
    kept.update(held_in_parts(data, rank))
    kept["accelerate"] = result(*longtail.calibrate(network(), prepared(data), **device))
    torch.save(kept, out / f"rank{rank}.pt")
    dist.destroy_process_group()


def here_while_alone():
    """What another process that came later would see of one that works alone."""
    with taking_part(group_of_caller(torch.device("cpu"))) as world:
        return world.size, change_meeting(dist.distributed_c10d._get_default_store(), lambda *now: now)[1]


def prepared(data):
    """A loader as the Trainer of transformers makes it: shuffled, dealt out, padded to even batches."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    return accelerator.prepare(DataLoader(data, 8, shuffle=True))


def wrapped(model):
    """By the first version of FSDP."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather see the second
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def held_in_parts(data, rank):
    """Tensor parallelism and FSDP."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    kept, mesh = {}, init_device_mesh("cpu", (2,))
    x, y = samples()
    for style, plan in (("column", ColwiseParallel(output_layouts=Replicate())), ("row", RowwiseParallel())):
        layouts = {"fc": plan if style == "column" else RowwiseParallel(input_layouts=Replicate())}
        model = parallelize_module(network(), mesh, layouts)
        repaired, method = longtail.calibrate(model, [(x, y)], device="cpu")
        weight = repaired.fc.weight
        assert (type(weight), weight.placements) == (type(model.fc.weight), model.fc.weight.placements)
        with torch.no_grad():
            answer = repaired.eval()(x), method.transform(network().eval()(x))
        kept[style] = {"scale_": torch.as_tensor(method.scale_), "answer": answer[0], "expected": answer[1]}
    uneven = Subset(data, range(40) if rank == 0 else range(40, SIZE))  # 5 batches here, 8 there
    for version, sharded in (("fsdp", fully_shard(network(), mesh=mesh)), ("fsdp 1", wrapped(network()))):
        kept[f"{version} refused"] = refused(
            lambda one=sharded: longtail.calibrate(one, DataLoader(data, 8), device="cpu")
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs = longtail.extract(sharded, DataLoader(uneven, 8), device="cpu")
        method = longtail.MARC().fit(outputs)
        attached = longtail.attach(sharded, method).eval()
        with torch.no_grad():
            answer = attached(x), method.transform(network().eval()(x))
        kept[version] = {"logits": torch.from_numpy(outputs.logits), "answer": answer[0], "expected": answer[1]}
    return kept


if __name__ == "__main__":
    main(Path(sys.argv[1]))
