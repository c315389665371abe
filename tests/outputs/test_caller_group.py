"""Processes of the caller's group that meet in its store: all of them take part or none, whenever they come and go."""

import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from longtail.distributed import World
from longtail.errors import UserError
from longtail.outputs import gather
from longtail.outputs.gather import change, taking_part


@pytest.fixture
def store(monkeypatch):
    """The store of a group."""
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    return store


@pytest.fixture
def events(store, monkeypatch):
    """What other processes do, by the second; the clock moves by a second at each look, and 10 seconds are waited."""
    clock, events = itertools.count(1), {}

    def sleep(_):
        now.seconds = next(clock)
        for edit in events.pop(now.seconds, ()):
            change(store, edit)

    now = SimpleNamespace(seconds=0, monotonic=lambda: now.seconds, sleep=sleep)
    monkeypatch.setattr(gather, "time", now)
    monkeypatch.setenv("LONGTAIL_JOIN_TIMEOUT", "10")
    monkeypatch.setenv("LONGTAIL_TIMEOUT", "1000")
    return events


def call(rank, size=2, needed=""):
    """How many processes took part in the call."""
    with taking_part(World(rank, size, torch.device("cpu")), needed=needed) as world:
        return world.size


def enters(rank, size=2):
    return lambda now: now.entered(rank, size)


def leaves(rank):
    return lambda now: now.left(rank)


def test_no_process_works_alone_where_others_waited_too(events):
    """Of three processes one is missing; the second to give up saw the first."""
    events[3], events[8] = [enters(1, 3)], [leaves(1)]
    with pytest.raises(UserError, match="process 2 has not made this call, says process 0; some of the processes"):
        call(0, size=3)


def test_a_process_that_was_killed_in_its_last_call_is_not_awaited_for_ever(events):
    events[1] = [enters(1)]
    assert call(0) == 2
    assert call(0) == 1


@pytest.mark.parametrize("size", [2, 3])
def test_all_or_none_take_part_however_they_come_and_go(store, monkeypatch, size):
    """Each process counts the calls that it made together with all: the same number everywhere."""
    monkeypatch.setattr(gather, "joining_seconds", lambda: random.random() / 100)
    monkeypatch.setattr(gather, "POLL_SECONDS", 0.0005)

    def work(rank):
        together, alone = 0, 0
        for _ in range(150):
            try:
                with taking_part(World(rank, size, torch.device("cpu"))) as world:
                    together += world.size == size
                    alone += world.size == 1
                    time.sleep(random.random() / 500)
            except UserError:
                pass
            time.sleep(random.random() / 50 if random.random() < 0.2 else 0)
        return together, alone

    with ThreadPoolExecutor(size) as threads:
        counted = list(threads.map(work, range(size)))
    met = change(store, lambda now: now)
    assert [together for together, _ in counted] == [met.number] * size
    assert met.number > 0
    assert sum(alone for _, alone in counted) > 0
    assert not met.waiting
    assert not met.busy
