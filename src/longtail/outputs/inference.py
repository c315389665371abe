"""Runs a model over the batches of a loader: its logits and, where its head is detected, the features before it.

`InferenceSession.infer` is the only inference loop of the library: extraction, calibration, scores and predictions use
it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from operator import length_hint
from typing import Any, Literal

import torch
from torch import Tensor, nn

from longtail.backbones import evaluating
from longtail.distributed import World, find_device, group_of_caller
from longtail.errors import UserError
from longtail.files.progress import QUIET, Display
from longtail.files.tensors import random_state_kept
from longtail.heads.attach import OutputPath, two_logits
from longtail.heads.find import SINGLE_LABEL, Form, Head, search
from longtail.heads.fold import gathered, recording, unwrap
from longtail.outputs.batches import ModelBatch, model_batches, read_batches
from longtail.outputs.gather import same_weights, taking_part
from longtail.outputs.loaders import ImageLoader

BATCHWISE = 0.05  # of the spread of logits; half precision and dynamic quantisation change them by a hundredth
SAMPLES = 32  # with which the head is searched, and a folded calibration is verified


@dataclass(frozen=True)
class BatchOutputs:
    """Logits (N, K) of one batch and, if the head receives one vector per sample, features (N, D).

    The features of several heads are concatenated. `explained` is False if the head does not give these logits.
    """

    logits: Tensor
    features: Tensor | None = None
    explained: bool = True


def forward(model: nn.Module, batch: ModelBatch, head: Head) -> BatchOutputs:
    """Run a batch through the model, and check that its head gives the logits of this batch too."""
    samples = len(batch.labels)
    layers = {path: model.get_submodule(path) for path in head.layers}
    with recording(layers) as calls:
        output = gathered(head.path.logits(model(*batch.args, **batch.kwargs)))
    if len(output) != samples:
        raise UserError(f"{type(model).__name__} gives {len(output)} rows of logits for {samples} labels")
    logits = head.logits(calls, output) if layers else output
    features = head.features(layers, calls, samples) if head.has_features and logits is not None else None
    explained = logits is not None and (features is not None or not head.has_features)
    if logits is None or not explained or head.form == "logits":
        logits = output
    return BatchOutputs(two_logits(logits) if head.single else logits, features if explained else None, explained)


@dataclass
class InferenceSession:
    """A model that is ready to run, without its wrappers and in evaluation mode, and its head."""

    model: nn.Module
    device: torch.device  # where its inputs go
    world: World  # the processes that share the work
    head: Head | None = None  # None to detect it in the first batch
    name: str | None = None  # of the classifier layer, if the user named it
    forms: tuple[Form, ...] = SINGLE_LABEL  # what the model may apply to its logits at the end
    sharding: Literal["", "tensor", "fsdp"] = ""  # how processes share its parameters
    home: torch.device | None = None  # where the model was before; None if it was not moved
    check: Callable[[Head], None] = lambda head: None  # raises for heads that the caller cannot use
    samples: list[ModelBatch] = field(default_factory=list)  # the first ones, and those with the largest logits
    _largest: float = -1.0

    @classmethod
    def of_network(cls, network: nn.Module, world: World, head: Head | None = None) -> InferenceSession:
        """A network of this library in evaluation mode; without a head, only its output is kept."""
        return cls(network.to(world.device), world.device, world, head or Head(OutputPath()))

    @torch.no_grad()
    def infer(
        self, loader: Any, title: str, display: Display = QUIET, *, multilabel: bool = False
    ) -> Iterator[tuple[ModelBatch, BatchOutputs]]:
        """Each batch of a loader with its outputs; the head is detected in the first and verified in every batch."""
        source = read_batches(loader)
        batches = model_batches(source, loader, self.model, self.device, multilabel=multilabel)
        if self.sharding and self.world.size > 1:
            batches = _in_step(batches, self.world)
        of_images = isinstance(loader, ImageLoader)
        total, unit = (loader.passes * len(loader.images), "images") if of_images else (length_hint(source), "batches")
        is_first = True
        with (display if self.world.is_main else QUIET).task(title, total, unit=unit) as task:
            for batch in batches:
                if self.head is None:
                    self.head = self.detect_head(batch)
                if is_first:
                    self.check(self.head)
                outputs = forward(self.model, batch, self.head)
                if not outputs.explained:
                    self.head = self.head.only_for_first(self.model)
                    self.check(self.head)
                    kept = f"features and head of {type(self.model).__name__} are not kept"
                    warnings.warn(f"{kept}: {self.head.obstacle}", stacklevel=4)
                elif is_first and not self.sharding:
                    warn_if_batchwise(self.model, batch, outputs.logits, self.head)
                is_first = False
                yield batch, outputs
                task.advance(len(batch.labels) * self.world.size if of_images else 1)

    def detect_head(self, batch: ModelBatch) -> Head:
        """The head of the model, detected with some samples of a batch."""
        some = batch.only(slice(SAMPLES))

        def run() -> Any:
            with random_state_kept():
                return self.model(*some.args, **some.kwargs)

        return search(self.model, run, len(some.labels), self.name, self.forms)

    def keep_sample(self, batch: ModelBatch, logits: Tensor) -> None:
        """Keep the first samples of all, and the samples of a batch with the largest logits so far."""
        size = logits.abs().amax(1)
        if float(size.max()) > self._largest or not self.samples:
            self._largest = float(size.max())
            first = self.samples[0] if self.samples else batch.only(slice(SAMPLES))
            self.samples = [first, batch.only(size.argsort(descending=True)[:SAMPLES].to(batch.labels.device))]


def _in_step(batches: Iterable[ModelBatch], world: World) -> Iterator[ModelBatch]:
    """Batches until those of all processes have ended; a process that has no more repeats its last."""
    iterator = iter(batches)
    last = None
    while True:
        batch = next(iterator, None)
        if not any(world.gather(batch is not None)):
            return
        if batch is None:
            if last is None:
                raise UserError("the loader gave no batches")
            batch = replace(last, repeated=True)
        last = batch
        yield batch


def warn_if_batchwise(model: nn.Module, batch: ModelBatch, logits: Tensor, head: Head) -> None:
    """Run the first two samples of a batch without the others, twice, and warn if their logits are others."""
    size = min(2, len(batch.labels) - 1)
    some = batch.only(slice(size))
    if not size or len(some.labels) != size:
        return
    try:
        with random_state_kept():
            alone, again = (forward(model, some, head).logits.double() for _ in range(2))
    except Exception:  # some models take batches of one size only
        return
    is_random = not torch.allclose(alone, again, rtol=1e-3, atol=1e-3 * float(alone.std()))
    if not is_random and float((alone - logits[:size]).abs().max()) > BATCHWISE * float(logits.double().std()):
        message = "depend on the rest of the batch (batch-norm without running statistics?): alone, samples get others"
        warnings.warn(f"the logits of {type(model).__name__} {message}", stacklevel=2)


@contextmanager
def inference_session(
    model: nn.Module,
    device: str = "auto",
    *,
    name: str | None = None,
    forms: tuple[Form, ...] = SINGLE_LABEL,
    shards: int = 1,
    alone: bool = False,
) -> Iterator[InferenceSession]:
    """Prepares a model to be run, and restores its state at the end.

    Args:
        model: any module; wrapped or compiled ones too.
        device: where to run: auto, cpu, cuda, …
        name: of the classifier layer, if the user named it.
        forms: what the model may apply to its logits at the end.
        shards: number of processes that the samples are divided among.
        alone: whether each process works for itself.
    """
    inner = unwrap(model)
    if any(tensor.is_meta for tensor in inner.parameters()):
        raise UserError(
            f"{type(inner).__name__} has parameters without numbers (device meta); load its weights before calibrating"
        )
    kinds = {kind.__name__ for module in inner.modules() for kind in type(module).__mro__}
    sharded: Literal["", "tensor", "fsdp"] = ""
    if kinds & {"FullyShardedDataParallel", "FSDPModule"}:  # the first version and the second
        sharded = "fsdp"
    elif any(hasattr(parameter, "full_tensor") for parameter in inner.parameters()):
        sharded = "tensor"
    devices = {tensor.device for tensor in (*inner.parameters(), *inner.buffers())}
    if len(devices) > 1 or sharded:  # it stays on its devices
        target, home = next(iter(inner.parameters())).device, None
    else:
        target = find_device(device)
        home = next(iter(devices), target)
    world = World(0, 1, target) if alone and not sharded else group_of_caller(target)
    if shards not in (1, world.size):
        raise UserError(
            f"the loader deals its samples out to {shards} processes, and there are {world.size} in the group; open "
            "the group first (torch.distributed.init_process_group), or leave the distributed sampler out"
        )
    with ExitStack() as stack:
        stack.enter_context(random_state_kept())
        if world.size > 1:
            needed = "the processes share the parameters of the model" if sharded else ""
            needed = needed or ("the loader gives each process a shard of the samples" if shards > 1 else "")
            world = stack.enter_context(taking_part(world, needed=needed))
        if home is not None:
            inner.to(target)
            stack.callback(inner.to, home)
        stack.enter_context(evaluating(inner))
        if hasattr(torch.compiler, "set_stance"):  # hooks do not run in compiled code
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if world.size > 1 and not sharded:
            stack.enter_context(same_weights(inner, world))
        yield InferenceSession(inner, target, world, None, name, forms, sharded, home)
