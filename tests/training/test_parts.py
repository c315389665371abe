"""Parts of the loop, each beside what it should do: stopping, rehearsing, the journal's sums, draws of a step."""

import math
import signal
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from longtail.data.splits import open_splits
from longtail.distributed import SINGLE_PROCESS
from longtail.errors import UserError
from longtail.files.progress import QUIET
from longtail.files.records import read_lines
from longtail.recipes import RECIPES
from longtail.training import journal as journal_module
from longtail.training import rehearsal
from longtail.training.checkpoint import load_checkpoint, save_checkpoint
from longtail.training.journal import Journal
from longtail.training.loop import StopRequest, Trainer, _require_apart
from longtail.training.plan import Plan
from longtail.training.rehearsal import emulates_bfloat16, own_random_numbers, prepare, rehearse
from longtail.training.step import Streams, TrainingStep, compiled, take_step

SHORT = replace(RECIPES["digits-lt"], epochs=None, iterations=10, batch_size=16, warmup=0, device="cpu")
OTHERS = {
    "size": 2,
    "rank": 1,
    "is_main": False,
    "device": torch.device("cpu"),
    "barrier": lambda: None,
    "gather": lambda value: [value, value],
}


def two(**more):
    """Two processes, as far as a part of the loop asks for them."""
    return SimpleNamespace(**{**OTHERS, **more})


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGTERM),  # a closed terminal
    ],
)
def test_a_signal_is_a_request(number, told):
    stop = StopRequest()
    assert stop.requested(SINGLE_PROCESS) == 0
    stop._ask(number, None)
    assert stop.requested(SINGLE_PROCESS) == told
    assert stop.requested(two(sum=lambda counts: counts)) == told


def test_a_request_to_any_process_is_one_to_all():
    """Sums over the processes: how many were interrupted, how many terminated."""
    stop, asked = StopRequest(), []

    def requested(*others):
        return stop.requested(two(sum=lambda counts: asked.append(counts.tolist()) or counts + torch.tensor(others)))

    assert requested(0.0, 0.0) == 0
    assert requested(3.0, 0.0) == signal.SIGINT
    assert requested(0.0, 1.0) == requested(2.0, 1.0) == signal.SIGTERM
    stop._ask(signal.SIGINT, None)
    assert requested(0.0, 0.0) == signal.SIGINT
    stop._ask(signal.SIGTERM, None)
    assert requested(0.0, 0.0) == signal.SIGTERM
    assert asked == [[0, 0]] * 4 + [[1, 0], [0, 1]]


def streams_of(config, names=("instance",), world=SINGLE_PROCESS):
    made = Streams(config, open_splits(config), names, world, QUIET)
    made.open_images()
    return made


def test_processes_and_parts_share_the_draws_of_a_step():
    config = replace(SHORT, accumulate=2)
    whole = [draw.indices.tolist() for draw in streams_of(SHORT).draws(streams_of(SHORT).samplers[0], 0, 3)]
    found = []
    for rank in (0, 1):
        made = streams_of(config, world=two(rank=rank))
        found.append([draw.indices.tolist() for draw in made.draws(made.samplers[0], 0, 3)])
    assert [len(draw) for draw in found[0]] == [4] * 6  # two parts of each step
    for step in range(3):
        drawn = [index for rank in (0, 1) for part in (0, 1) for index in found[rank][2 * step + part]]
        assert sorted(drawn) == sorted(whole[step])
    later = streams_of(config)
    assert (
        next(later.draws(later.samplers[0], 2, 3)).indices.tolist()
        == next(
            draw for number, draw in enumerate(later.draws(later.samplers[0], 0, 3)) if number == 4
        ).indices.tolist()
    )


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match="--batch-size 16 does not divide into 3 parts x 1 processes"):
        streams_of(replace(SHORT, accumulate=3))
    with pytest.raises(UserError, match="--batch-size 18 does not divide into 2 parts x 2 processes"):
        streams_of(replace(SHORT, accumulate=2, batch_size=18), world=two())
    with pytest.raises(UserError, match=r"softmax has its own samplers \(instance, reverse\); leave out --sampler"):
        streams_of(replace(SHORT, sampler="class-balanced"), ("instance", "reverse"))
    own = streams_of(replace(SHORT, sampler="class-balanced"))
    assert len(own.samplers) == 1
    assert not own.decodes  # these images are in memory


def test_seconds_are_those_of_the_steps_that_are_left(monkeypatch):
    """By a clock that moves 0.1 s each time it is read: 0.1 s to read a batch, 0.1 s for its step."""
    ticks = iter(range(1_000))
    monkeypatch.setattr(rehearsal, "time", SimpleNamespace(monotonic=lambda: 0.1 * next(ticks)))
    streams, state, plan = prepare(SHORT, open_splits(SHORT), SINGLE_PROCESS, QUIET)
    streams.open_images()
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    assert rehearse(streams, state, SHORT, plan, SINGLE_PROCESS) == pytest.approx(10 * 0.2)
    assert next(ticks) == 1 + 5 * 4 + 1  # five steps of four readings, until two seconds have passed
    assert state.step == 0
    assert all(torch.equal(value, before[name]) for name, value in state.model.state_dict().items())
    state.step = 4
    assert rehearse(streams, state, SHORT, plan, SINGLE_PROCESS) == pytest.approx(6 * 0.2)
    monkeypatch.setattr(Streams, "decodes", True)  # then workers read while the network computes
    busy = replace(SHORT, workers=4)
    assert rehearse(streams, state, busy, plan, SINGLE_PROCESS) == pytest.approx(6 * 0.1)
    several = []
    monkeypatch.setattr(rehearsal, "take_step", lambda *given: several.append(1) or torch.zeros(()))
    rehearse(streams, state, SHORT, plan, two())
    assert several == [1]  # all processes take one step


def test_slow_steps_are_measured_for_two_seconds(monkeypatch):
    ticks = iter(range(1_000))
    monkeypatch.setattr(rehearsal, "time", SimpleNamespace(monotonic=lambda: 0.5 * next(ticks)))
    streams, state, plan = prepare(SHORT, open_splits(SHORT), SINGLE_PROCESS, QUIET)
    streams.open_images()
    taken = []
    monkeypatch.setattr(rehearsal, "take_step", lambda *given: taken.append(1) or torch.zeros(()))
    rehearse(streams, state, SHORT, plan, SINGLE_PROCESS)
    assert len(taken) == 1


@pytest.mark.parametrize(("size", "accepted"), [(4096, True), (4097, False), (10**18, False)])
def test_a_batch_of_more_images_than_there_are_is_refused(size, accepted):
    config = replace(SHORT, batch_size=size)
    with nullcontext() if accepted else pytest.raises(UserError, match=f"a batch of {size:,} images; .* has [0-9]+$"):
        prepare(config, open_splits(config), SINGLE_PROCESS, QUIET)


def test_memory_that_does_not_suffice_is_said(monkeypatch):
    def full(*given):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(rehearsal, "take_step", full)
    streams, state, plan = prepare(replace(SHORT, accumulate=2), open_splits(SHORT), SINGLE_PROCESS, QUIET)
    streams.open_images()
    with pytest.raises(UserError, match=r"a batch of 16 images does not fit .* --accumulate 4 to split it"):
        rehearse(streams, state, replace(SHORT, accumulate=2), plan, SINGLE_PROCESS)


def test_which_devices_emulate_bfloat16(monkeypatch):
    for capability, emulated in (((7, 5), True), ((8, 0), False), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, told=capability: told)
        assert emulates_bfloat16(torch.device("cuda")) is emulated


def test_only_the_block_has_its_own_random_numbers():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with own_random_numbers(torch.device("cpu")):
        torch.manual_seed(9)
    assert torch.equal(torch.rand(3), expected)


def test_a_step_takes_the_mean_over_its_parts_and_the_rate_of_each_part_of_the_network():
    config = replace(SHORT, accumulate=2)
    streams, state, plan = prepare(config, open_splits(config), SINGLE_PROCESS, QUIET)
    streams.open_images()
    losses = iter([torch.tensor(3.0, requires_grad=True), torch.tensor(5.0, requires_grad=True)])
    step = TrainingStep(state.model, state.objective)
    step.forward = lambda batches, progress: next(losses) * 1.0
    assert take_step(step, state, next(streams.batches(0, 1)), config, plan, SINGLE_PROCESS).item() == 4.0
    assert state.step == 1
    assert {group["lr"] for group in state.optimizer.param_groups} == {plan.learning_rate(0)}
    seeds = np.random.SeedSequence((config.seed, 0, 0)).generate_state(1, np.uint64)
    assert torch.initial_seed() == int(seeds[0])


def journal_of(folder, world=SINGLE_PROCESS):
    return Journal(folder, SHORT, open_splits(SHORT), world)


def test_the_mean_loss_is_that_since_the_last_record(tmp_path):
    journal = journal_of(tmp_path)
    assert journal.mean_loss() == 0  # of no step
    for loss in (1.0, 2.0, 6.0):
        journal.add(torch.tensor(loss))
    assert (journal.mean_loss(), journal.loss_steps) == (3.0, 3)
    several = journal_of(tmp_path, two(sum=lambda total: total + torch.tensor([8.0, 1.0])))
    several.add(torch.tensor(2.0))
    assert several.mean_loss() == 5.0
    journal.add(torch.tensor(math.nan))
    with pytest.raises(UserError, match="no longer finite"):
        journal.mean_loss()


def test_a_record_says_where_the_run_is(tmp_path):
    journal, plan = journal_of(tmp_path), Plan(steps=10, batch_size=16, epoch_images=48, lr=0.5)
    journal.add(torch.tensor(1.5))
    text = journal.record(plan, SimpleNamespace(step=4), 1.5, None, 123.456)
    assert text == "epoch 2/4  loss 1.5000"
    expected = {
        "step": 4,
        "epoch": 1.333,
        "images": 64,
        "loss": 1.5,
        "lr": plan.learning_rate(3),
        "images_per_s": 123.5,
    }
    assert read_lines(tmp_path / "metrics.jsonl") == [expected]
    assert (journal.loss_steps, float(journal.loss_sum)) == (0, 0.0)


def test_progress_is_written_once_a_second(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(journal_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    (tmp_path / "run").mkdir()
    journal, path = journal_of(tmp_path / "run"), tmp_path / "run" / journal_module.PROGRESS_FILE
    journal.tick(7)
    assert path.read_text() == "7\n"
    for later, expected in ((100.9, 7), (101.0, 9), (101.5, 9)):
        now[0] = later
        journal.tick(expected if later != 100.9 else 8)
        assert int(path.read_text()) == expected
    other = journal_of(tmp_path / "run", two())
    now[0] = 500.0
    other.tick(99)  # only the first process writes
    assert int(path.read_text()) == 9


def test_the_loss_is_read_every_twenty_steps():
    trainer = SimpleNamespace(
        state=SimpleNamespace(step=20),
        plan=Plan(steps=100, batch_size=1, epoch_images=30, lr=0.1),
        journal=SimpleNamespace(mean_loss=lambda: 1.23456),
    )
    assert Trainer._note(trainer) == "epoch 1/4  loss 1.235"
    trainer.state.step = 21
    assert Trainer._note(trainer) == ""


def test_a_run_is_not_written_among_its_images(tmp_path):
    inside = replace(SHORT, data="folder", root=str(tmp_path))
    with pytest.raises(UserError, match="is inside the images of"):
        _require_apart(tmp_path / "run", inside)
    _require_apart(tmp_path.parent / "run", inside)
    _require_apart(tmp_path / "run", SHORT)  # these images are not in a folder
    _require_apart(tmp_path / "run", replace(SHORT, data="folder", root=None))


def test_a_process_that_cannot_see_the_folder_is_named(tmp_path):
    journal = journal_of(tmp_path / "run", two(gather=lambda value: [True, False]))
    with pytest.raises(UserError, match="process 1 cannot see"):
        journal.require_usable(resume=False, overwrite=False)


@pytest.mark.parametrize("kept", [None, "checkpoint.safetensors", "model.safetensors"])
def test_a_run_that_fails_at_its_beginning_leaves_nothing(tmp_path, kept):
    """Unless it has a checkpoint or a model."""
    for name in ("run.json", "metrics.jsonl", *([kept] if kept else [])):
        (tmp_path / name).write_text("x")
    journal = journal_of(tmp_path)
    journal.resuming = True
    journal.forget_beginning()
    assert (tmp_path / "run.json").exists()  # a resumed run had its beginning before
    journal.resuming = False
    journal.forget_beginning()
    assert (tmp_path / "run.json").exists() == (tmp_path / "metrics.jsonl").exists() == (kept is not None)


def test_only_a_resumed_run_is_finished(tmp_path):
    (tmp_path / "model.safetensors").write_text("x")
    journal = journal_of(tmp_path)
    assert not journal.finished
    journal.resuming = True
    assert journal.finished
    (tmp_path / "model.safetensors").unlink()
    assert not journal.finished


def test_a_checkpoint_holds_what_training_goes_on_from(tmp_path):
    streams, state, plan = prepare(SHORT, open_splits(SHORT), SINGLE_PROCESS, QUIET)
    streams.open_images()
    step = TrainingStep(state.model, state.objective)
    for batches in streams.batches(0, 2):
        take_step(step, state, batches, SHORT, plan, SINGLE_PROCESS)
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, state, loss_sums=[1.5, 2.5], loss_steps=3)
    _, other, _ = prepare(SHORT, open_splits(SHORT), SINGLE_PROCESS, QUIET)
    header = load_checkpoint(path, other, steps=2)  # the last step of all is one that can be loaded
    assert (header.step, header.processes, header.loss_sums, header.loss_steps) == (2, 2, [1.5, 2.5], 3)
    assert other.step == 2
    for name, value in state.parameters().items():
        own = other.parameters()[name]
        assert torch.equal(own, value)
        assert torch.equal(
            other.optimizer.state[own]["momentum_buffer"], state.optimizer.state[value]["momentum_buffer"]
        )
    with pytest.raises(UserError, match="step 2 of 1 cannot be right"):
        load_checkpoint(path, other, steps=1)


@pytest.mark.parametrize(("message", "said"), [("no compiler\nand more", "no compiler"), ("", "RuntimeError")])
def test_why_a_network_is_not_compiled(message, said, monkeypatch):
    def refuse(model):
        raise RuntimeError(message)

    lines, model = [], torch.nn.Linear(2, 2)
    monkeypatch.setattr(torch, "compile", refuse)
    assert compiled(model, torch.zeros(1, 2), SimpleNamespace(line=lines.append)) is model
    assert lines == [f"torch.compile does not work here, training continues without it: {said}"]


@pytest.mark.parametrize(("count", "launch", "restarted"), [("0", "a", False), ("1", "a", True), ("1", "b", False)])
def test_a_run_is_restarted_by_the_launch_that_began_it(tmp_path, monkeypatch, count, launch, restarted):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    monkeypatch.setattr(journal_module, "launch_id", lambda: launch)
    record = SimpleNamespace(record=SimpleNamespace(started_by="a"))
    monkeypatch.setattr(journal_module, "Run", SimpleNamespace(open=lambda folder: record))
    assert journal_of(tmp_path)._restarted() is restarted
