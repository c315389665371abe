"""Runs a model over batches: its logits and, where its head is found, the features before it.

`infer` is the only inference loop of the library: extraction, calibration, scores and predictions use it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from longtail.backbones.inference import evaluating
from longtail.distributed import World, find_device, group_of_caller
from longtail.errors import UserError
from longtail.files.tensors import random_state_kept
from longtail.heads.attach import OutputPath, two_logits
from longtail.heads.find import SINGLE_LABEL, Form, Head, close, follows, probe, search
from longtail.heads.fold import changed, head_features, recording
from longtail.heads.layers import hash_of, runs_together, unwrap, whole
from longtail.outputs.batches import ModelBatch
from longtail.outputs.gather import taking_part

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

    def arrays(self) -> dict[str, np.ndarray]:
        """Both on the CPU, in single precision."""
        values = {"logits": self.logits, "features": self.features}
        return {name: value.float().cpu().numpy() for name, value in values.items() if value is not None}


@torch.no_grad()
def infer(
    model: nn.Module, batches: Iterable[ModelBatch], detector: HeadDetector | None = None
) -> Iterator[tuple[ModelBatch, BatchOutputs]]:
    """Each batch with its outputs; features only with a detector of the head."""
    plain = Head(OutputPath())
    for batch in batches:
        yield batch, forward(model, batch, plain) if detector is None else detector.outputs(batch)


class HeadDetector:
    """Finds the head of a model in the first batch, and verifies it on every batch.

    Args:
        model: in evaluation mode.
        name: of the classifier layer, if the user named it.
        head: the head, if it is known already.
        check: raises for heads that the caller cannot use.
        forms: what the model may apply to its logits at the end.

    Attributes:
        samples: the first samples, and those with the largest logits.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str | None = None,
        *,
        head: Head | None = None,
        check: Callable[[Head], None] = lambda head: None,
        forms: tuple[Form, ...] = SINGLE_LABEL,
    ) -> None:
        self.model, self.name, self.head, self.check, self.forms = model, name, head, check, forms
        self._compared_alone = head is not None or runs_together(model)
        self.first: Head | None = None
        self.samples: tuple[ModelBatch, ...] = ()
        self._largest = 0.0

    def outputs(self, batch: ModelBatch) -> BatchOutputs:
        """The outputs of one batch."""
        if self.head is None:
            self.head = detect_head(self.model, batch, self.name, self.forms)
        if self.first is None:
            self.first = self.head
            self.check(self.head)
        outputs = forward(self.model, batch, self.head)
        if outputs.explained and not self._compared_alone and len(batch) > 1:
            self._compared_alone = True
            warn_of_batchwise(self.model, batch, outputs.logits, self.head)
        if not outputs.explained:
            self.head = self.head.only_for_first(self.model)
            self.check(self.head)
        size = outputs.logits.abs().amax(1)
        if not self.samples or float(size.max()) > self._largest:
            self._largest = float(size.max())
            large = batch.only(size.argsort(descending=True)[:SAMPLES].to(batch.labels.device))
            self.samples = (self.samples[0] if self.samples else batch.only(slice(SAMPLES)), large)
        return outputs

    def agree(self, world: World) -> Head:
        """The head that all processes found; an obstacle in one process is an obstacle for all."""
        heads: list[Head] = world.gather(self.head)
        head = next((one for one in heads if one.obstacle or not one.has_features), heads[0])
        if len({(one.layers, one.form) for one in heads if one.layers}) > 1:
            head = next(one for one in heads if one.layers).only_for_first(self.model)
        self.head = head
        self.check(head)
        return head


def detect_head(
    model: nn.Module, batch: ModelBatch, only: str | None = None, forms: tuple[Form, ...] = SINGLE_LABEL
) -> Head:
    """The head of a model, found with some samples of a batch."""
    some = batch.only(slice(SAMPLES))

    def run() -> Any:
        with random_state_kept():
            return model(*some.args, **some.kwargs)

    try:
        run()
    except NotImplementedError as error:
        inside = ", ".join(name for name, _ in model.named_children())
        raise UserError(
            f"{type(model).__name__} has no forward that gives logits; write one, or pass the network inside it "
            f"(its parts: {inside or 'none'})"
        ) from error
    except Exception as error:
        raise UserError(f"{type(model).__name__} fails on the first batch: {type(error).__name__}: {error}") from error
    return search(model, run, len(some), only, forms)


def forward(model: nn.Module, batch: ModelBatch, head: Head) -> BatchOutputs:
    """Run a batch through the model, and check that its head gives the logits of this batch too."""
    outputs = _forward(model, batch, head)
    return replace(outputs, logits=two_logits(outputs.logits)) if head.single else outputs


def _forward(model: nn.Module, batch: ModelBatch, head: Head) -> BatchOutputs:
    layers = {path: model.get_submodule(path) for path in head.layers}

    def run() -> Tensor:
        with random_state_kept() if head.reduction == "unknown" else nullcontext():
            return whole(head.path.logits(model(*batch.args, **batch.kwargs)))

    with recording(layers) as recorded:
        output = run()
    if len(output) != len(batch):
        raise UserError(f"{type(model).__name__} gives {len(output)} rows of logits for {len(batch)} labels")
    if not layers:
        return BatchOutputs(output)
    logits = output
    if head.reduction == "unknown":
        with changed(list(layers.values()), *probe(output)):
            explained = follows(head, output, run())
        torch.rand(())  # the next batch draws other random numbers
    else:
        of_layers = head.sum_of(layers, recorded, output)
        finite = output.isfinite().all(1)  # other rows are named by the check of the logits
        explained = of_layers is not None and (
            not bool(finite.any()) or close(head.formed(of_layers)[finite], output[finite])
        )
        logits = output if head.form == "logits" or of_layers is None else of_layers
    inputs = [head_features(layer, recorded[path], len(batch)) for path, layer in layers.items()]
    features = [one for one in inputs if one is not None]
    if not explained or (head.has_features and len(features) < len(inputs)):
        return BatchOutputs(output, explained=False)
    if not head.has_features:
        return BatchOutputs(logits)
    return BatchOutputs(logits, features[0] if len(features) == 1 else torch.cat([one.float() for one in features], 1))


def warn_of_batchwise(model: nn.Module, batch: ModelBatch, logits: Tensor, head: Head) -> None:
    """Run the first two samples of a batch without the others, twice, and warn if their logits are others."""
    few = min(2, len(batch) - 1)
    some = batch.only(slice(few))
    if len(some) != few:
        return
    try:
        with random_state_kept():
            alone, again = (forward(model, some, head).logits.double() for _ in range(2))
    except Exception:  # some models take batches of one size only
        return
    together = logits[:few].double()
    is_random = not torch.allclose(alone, again, rtol=1e-3, atol=1e-3 * float(alone.std()))
    if not is_random and float((alone - together).abs().max()) > BATCHWISE * float(logits.double().std()):
        message = "depend on the rest of the batch (batch-norm without running statistics?): alone, samples get others"
        warnings.warn(f"the logits of {type(model).__name__} {message}", stacklevel=2)


@dataclass(frozen=True)
class InferenceSession:
    """A model that is ready to run.

    Args:
        model: without its wrappers, in evaluation mode.
        device: where its inputs go.
        home: where the model was before; None if it was not moved.
        modes: which of its modules were in training mode before.
        world: processes that share the work.
    """

    model: nn.Module
    device: torch.device
    home: torch.device | None
    modes: dict[str, bool]
    world: World

    def restored(self, copy: nn.Module) -> nn.Module:
        """A copy of the model in the modes and on the device of the model before."""
        inside = dict(copy.named_modules(remove_duplicate=False))
        for path, mode in self.modes.items():  # from the outside in
            if path in inside:
                inside[path].train(mode)
        return copy if self.home is None else copy.to(self.home)


@contextmanager
def inference_session(
    model: nn.Module, device: str = "auto", *, shards: int = 1, alone: bool = False
) -> Iterator[InferenceSession]:
    """Prepares a model to be run, and restores its state at the end.

    Args:
        model: any module; wrapped or compiled ones too.
        device: where to run: auto, cpu, cuda, …
        shards: number of processes that the samples are divided among.
        alone: whether each process works for itself.
    """
    inner = unwrap(model)
    tensors = [*inner.parameters(), *inner.buffers()]
    if any(tensor.is_meta for tensor in inner.parameters()):
        raise UserError(
            f"{type(inner).__name__} has parameters without numbers (device meta); load its weights before calibrating"
        )
    together, devices = runs_together(inner), {tensor.device for tensor in tensors}
    if len(devices) > 1 or together:  # it stays on its devices
        target, home = next(iter(inner.parameters())).device, None
    else:
        target = find_device(device)
        home = next(iter(devices), target)
    modes = {path: module.training for path, module in inner.named_modules(remove_duplicate=False)}
    world = World(0, 1, target) if alone and not together else group_of_caller(target)
    if shards not in (1, world.size):
        raise UserError(
            f"the loader deals its samples out to {shards} processes, and there are {world.size} in the group; open "
            "the group first (torch.distributed.init_process_group), or leave the distributed sampler out"
        )
    needed = "each process shows a part of the samples" if shards > 1 else ""
    if together:
        needed = "the model is held in parts by all of them"
    with ExitStack() as stack:
        stack.enter_context(random_state_kept())
        world = stack.enter_context(taking_part(world, needed=needed))
        if home is not None:
            inner.to(target)
            stack.callback(inner.to, home)
        stack.enter_context(evaluating(inner))
        if hasattr(torch.compiler, "set_stance"):  # hooks do not run in compiled code
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(same_weights(inner, world))
        yield InferenceSession(inner, target, home, modes, world)


@contextmanager
def same_weights(model: nn.Module, world: World) -> Iterator[None]:
    """Buffers as process 0 has them while the block runs; an error where the parameters are not the same.

    DistributedDataParallel keeps parameters equal. Statistics of batch-norm are those of each process until the
    next training step; what is saved and served are those of process 0.
    """
    if world.size == 1 or runs_together(model):
        yield
        return
    hashes = world.gather((hash_of(model.named_parameters()), hash_of(model.named_buffers())))
    others = [rank for rank, (parameters, _) in enumerate(hashes) if parameters != hashes[0][0]]
    if others:
        raise UserError(
            f"process {others[0]} holds a model with other weights than process 0; load the same everywhere"
        )
    buffers = list(model.buffers()) if len({digest for _, digest in hashes}) > 1 else []
    before = [buffer.clone() for buffer in buffers]
    world.broadcast(buffers)
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
