"""Processes that meet in a store: all of them take part or none, whenever each comes and goes."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from longtail.distributed import presence
from longtail.distributed.presence import Meeting, taking_part
from longtail.distributed.world import World
from longtail.errors import UserError


class Together:
    """A group's store, a clock that moves by a second at each look, and what others do at a given second."""

    def __init__(self, monkeypatch):
        self.store = dist.HashStore()
        self.seconds = 0
        self.script = {}
        monkeypatch.setattr(presence, "_store", lambda: self.store)
        monkeypatch.setattr(presence, "time", SimpleNamespace(monotonic=lambda: self.seconds, sleep=self.sleep))
        monkeypatch.setenv("LONGTAIL_JOIN_TIMEOUT", "10")
        monkeypatch.setenv("LONGTAIL_TIMEOUT", "1000")

    def sleep(self, _):
        self.seconds += 1
        for step in self.script.pop(self.seconds, ()):
            presence._change(self.store, step)

    def at(self, second, *steps):
        self.script[second] = steps

    def now(self):
        return presence._change(self.store, lambda now: now)

    def call(self, rank, size=2, needed=""):
        """How many processes took part in the call."""
        with taking_part(World(rank, size, torch.device("cpu")), needed=needed) as world:
            return world.size


@pytest.fixture
def group(monkeypatch):
    return Together(monkeypatch)


def enters(rank, size=2):
    return lambda now: now.entered(rank, size)


def ends(rank):
    return lambda now: now.left(rank)


def test_processes_that_come_in_time_work_together(group):
    group.at(10, enters(1))
    assert group.call(0) == 2
    assert group.now() == Meeting(1, busy=frozenset({1}))  # which has not finished its part


def test_a_process_that_nobody_joins_works_alone(group):
    assert group.call(0) == 1
    assert group.now() == Meeting()
    assert group.seconds == 11


def test_a_process_in_its_last_call_is_not_taken_for_one_in_the_next(group):
    """Process 1 has not left the first call when process 0 begins the second, and never makes that one."""
    group.at(1, enters(1))
    assert group.call(0) == 2
    group.at(5, ends(1))
    assert group.call(0) == 1


def test_time_does_not_run_while_another_finishes_its_last_call(group):
    """However long it writes a file: the next call is made together."""
    group.at(1, enters(1))
    assert group.call(0) == 2
    group.at(500, ends(1))
    group.at(508, enters(1))
    assert group.call(0) == 2
    assert group.seconds == 508


def test_a_process_that_was_killed_in_its_last_call_is_not_awaited_for_ever(group):
    group.at(1, enters(1))
    assert group.call(0) == 2
    assert group.call(0) == 1
    assert 1000 < group.seconds < 1020


def test_who_comes_at_the_last_moment_is_not_left_behind(group):
    """Process 1 enters after the last look of process 0: it counts on process 0 and must not wait in vain."""
    real, late = group.store, []

    class Late:
        def compare_set(self, key, expected, wanted):
            gives_up = (expected, wanted) == (Meeting(0, frozenset({0})).text(), Meeting().text())
            if gives_up and not late:
                late.append(presence._change(real, enters(1)))
            return real.compare_set(key, expected, wanted)

    group.store = Late()
    assert group.call(0) == 2
    assert late
    assert group.now().number == 1


def test_what_needs_all_is_refused_without_one_and_names_it(group):
    with pytest.raises(UserError, match="within 10 s: process 1 has not made this call, says process 0; each shows a"):
        group.call(0, needed="each shows a part")
    assert group.now() == Meeting()


def test_nobody_goes_alone_where_others_waited_too(group):
    """Of three processes one is missing; the second to give up saw the first."""
    group.at(3, enters(1, 3))
    group.at(8, ends(1))
    with pytest.raises(UserError, match="process 2 has not made this call, says process 0; some of the processes"):
        group.call(0, size=3)


def test_an_interrupted_wait_leaves_the_meeting(group, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(presence.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        group.call(0)
    assert group.now() == Meeting()


@pytest.mark.parametrize("size", [2, 3])
def test_all_or_none_take_part_however_they_come_and_go(monkeypatch, size):
    """Each process counts the calls that it made together with all: the same number everywhere."""
    store = dist.HashStore()
    monkeypatch.setattr(presence, "_store", lambda: store)
    monkeypatch.setattr(presence, "joining_seconds", lambda: random.random() / 100)
    monkeypatch.setattr(presence, "POLL_SECONDS", 0.0005)

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
    met = presence._change(store, lambda now: now)
    assert [together for together, _ in counted] == [met.number] * size
    assert met.number > 0
    assert sum(alone for _, alone in counted) > 0
    assert not met.waiting | met.busy
