"""Processes of the caller's group that meet in its store: all of them take part or none, whenever they come and go."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from longtail.distributed import World
from longtail.errors import UserError
from longtail.outputs import gather
from longtail.outputs.gather import change_meeting, taking_part


@pytest.fixture
def store(monkeypatch):
    """The store of a group."""
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    return store


def test_no_process_works_alone_where_others_waited_too(store, monkeypatch):
    """Of three processes one is missing; the second to give up saw the first."""
    monkeypatch.setenv("LONGTAIL_JOIN_TIMEOUT", "1")

    def call(rank):
        with taking_part(World(rank, 3, torch.device("cpu"))):
            pytest.fail("worked alone")

    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(call, rank) for rank in range(2)]
    for rank, one in enumerate(calls):
        with pytest.raises(UserError, match=f"process 2 has not made this call, says process {rank}; some of the"):
            one.result()


@pytest.mark.parametrize("size", [2, 3])
def test_all_or_none_take_part_however_they_come_and_go(store, monkeypatch, size):
    """Each process counts the calls that it made together with all: the same number everywhere."""
    monkeypatch.setattr(gather, "join_timeout", lambda: random.random() / 100)
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
    number, waiting = change_meeting(store, lambda *now: now)
    assert [together for together, _ in counted] == [number] * size
    assert number > 0
    assert sum(alone for _, alone in counted) > 0
    assert not waiting
