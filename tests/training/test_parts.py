"""Parts of the loop, each beside what it should do: stopping, rehearsing, the journal's sums, draws of a step."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from longtail.data.splits import open_splits
from longtail.distributed import SINGLE_PROCESS
from longtail.errors import UserError
from longtail.files.progress import QUIET
from longtail.recipes import RECIPES
from longtail.training import rehearsal
from longtail.training.journal import Journal
from longtail.training.rehearsal import prepare, rehearse
from longtail.training.step import Streams

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


def journal_of(folder, world=SINGLE_PROCESS):
    return Journal(folder, SHORT, open_splits(SHORT), world)


def test_a_process_that_cannot_see_the_folder_is_named(tmp_path):
    journal = journal_of(tmp_path / "run", two(gather=lambda value: [True, False]))
    with pytest.raises(UserError, match="process 1 cannot see"):
        journal.require_usable(resume=False, overwrite=False)
