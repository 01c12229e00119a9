"""A thread's jobs: each is done whoever comes first, and the way that costs less is taken."""

import itertools
import threading
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.runtime.worker import mask_thread
from lamina.runtime.worker.mask_thread import CheaperWay, Job, MaskThread

from ..every_line import happening, raising, traced


@pytest.fixture
def thread():
    made = MaskThread()
    yield made
    made.close()
    assert "lamina-masks" not in {each.name for each in threading.enumerate()}


@given(order=st.permutations(range(6)), twice=st.booleans())
def test_each_job_is_done_once_in_whatever_order_it_is_waited_for(order, twice):
    thread, done = MaskThread(), []
    jobs = [Job(lambda number=number: done.append(number)) for number in range(6)]
    for job in jobs:
        thread.start(job)
    for number in (*order, *order) if twice else order:
        jobs[number].result()
        assert number in done
    thread.close()
    assert sorted(done) == [*range(6)]


def test_a_job_that_the_thread_has_not_begun_is_done_by_who_waits_for_it(thread, monkeypatch):
    monkeypatch.setattr(mask_thread, "SECONDS_TO_BEGIN", 0)
    free, begun, doers = threading.Event(), threading.Event(), []
    held = Job(lambda: (begun.set(), free.wait()))
    thread.start(held)
    begun.wait()
    other = Job(lambda: doers.append(threading.current_thread()))
    thread.start(other)
    other.result()
    assert doers == [threading.current_thread()]
    free.set()
    held.result()
    thread.close()
    assert len(doers) == 1, "the thread has left it alone"


@pytest.mark.parametrize("is_started", [True, False], ids=["by the thread", "by who waits"])
def test_what_a_job_raises_is_raised_by_its_result_and_the_thread_goes_on(thread, is_started):
    def fail():
        raise MemoryError("of a matcher")

    job = Job(fail)
    if is_started:
        thread.start(job)
    job.wait()
    with pytest.raises(MemoryError, match="of a matcher"):
        job.result()
    after = Job(lambda: None)
    thread.start(after)
    after.result()


def test_an_interrupt_at_any_line_of_a_wait_leaves_the_job_to_be_waited_for():
    for line in range(1, 12):
        done = []
        job = Job(lambda: done.append(1))  # noqa: B023
        with suppress(KeyboardInterrupt), traced(happening(raising(KeyboardInterrupt), line)):
            job.result()
        job.result()
        assert done


COSTS = st.floats(1e-6, 1e-2)


@given(before=st.tuples(COSTS, COSTS), after=st.tuples(COSTS, COSTS))
def test_the_cheaper_way_is_taken_but_for_a_try_now_and_then_whichever_it_becomes(before, after):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_thread, "STEPS_BETWEEN_TRIES", 4)
        patch.setattr(mask_thread, "MOST_STEPS_BETWEEN_TRIES", 32)
        way = CheaperWay()
        for costs in (before, after):
            steps(way, costs, 32 * (mask_thread.NUM_NOTED + 1))  # by then all that counts is of these costs
            taken = steps(way, costs, 10 * 32)
            if costs[0] != costs[1]:
                assert taken.count(costs[0] < costs[1]) == 10


def test_tries_of_the_dearer_way_grow_rarer_until_it_is_the_cheaper_one():
    way = CheaperWay()
    tries = [number for number, is_thread in enumerate(steps(way, (2, 1), 8000)) if not is_thread]
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries[mask_thread.NUM_NOTED :])]
    assert gaps == [128, 256, 512, *[1024] * (len(gaps) - 3)]
    assert steps(way, (1, 2), 3000)[-128:].count(False) >= 127


def steps(way, costs, count):
    """The ways that so many steps take, where each costs so much."""
    taken = []
    for _ in range(count):
        taken.append(way.is_thread())
        way.note(taken[-1], costs[taken[-1]])
    return taken
