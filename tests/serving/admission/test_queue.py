"""The order in which requests get their turn."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lamina.serving.admission.queue import FairQueue


def add(queue: FairQueue, owner: str, priority: int = 0, size: int = 1):
    place = queue.place(owner, priority, size)
    queue.add(place)
    return place


def owners(queue: FairQueue) -> str:
    return "".join(queue.pop().owner for _ in range(len(queue)))


def test_one_owner_is_served_in_order_of_arrival():
    queue = FairQueue()
    places = [add(queue, "a") for _ in range(5)]
    assert [queue.pop() for _ in places] == places


def test_who_comes_late_and_asks_for_little_takes_turns_with_who_has_queued_much():
    queue = FairQueue()
    for _ in range(6):
        add(queue, "a")
    queue.pop()
    add(queue, "b")
    add(queue, "b")
    assert owners(queue) in ("ababaaa", "baabaaa", "babaaaa")


def test_turns_are_counted_in_sequences():
    queue = FairQueue()
    for _ in range(3):
        add(queue, "a", size=10)
    for _ in range(30):
        add(queue, "b")
    order = owners(queue)
    assert order.index("a") == 9
    assert order[:21].count("a") == 2


def test_lower_priorities_come_first_whoever_asks():
    queue = FairQueue()
    add(queue, "a", 1)
    add(queue, "b", 0)
    add(queue, "c", -1)
    add(queue, "b", -1)
    assert owners(queue) == "cbba"


def test_who_gives_all_places_up_stands_as_a_newcomer():
    queue = FairQueue()
    for _ in range(3):
        add(queue, "b")
    for place in [add(queue, "a") for _ in range(50)]:
        queue.remove(place)
    add(queue, "a")
    assert owners(queue).index("a") <= 1


def test_a_place_knows_what_is_served_before_it():
    queue = FairQueue()
    add(queue, "a", size=4)
    add(queue, "a", size=4)
    assert queue.size_before(queue.place("a", 0, 1)) == 8
    assert queue.size_before(queue.place("b", 0, 1)) == 0
    assert queue.size_before(queue.place("b", 1, 1)) == 8


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(-1, 1), st.integers(1, 9), st.integers(0, 3)),
        max_size=60,
    )
)
def test_all_that_waits_is_served_once_and_what_has_left_never(steps):
    queue, waiting = FairQueue(), []
    for owner, priority, size, action in steps:
        if action == 0 and waiting:
            queue.remove(waiting.pop(len(waiting) // 2))
        elif action == 1 and waiting:
            first = queue.pop()
            assert first == min(waiting)
            waiting.remove(first)
        else:
            waiting.append(add(queue, owner, priority, size))
        assert len(queue) == len(waiting)
        counted = Counter(place.owner for place in waiting)
        assert all(queue.num_of(owner) == counted[owner] for owner in "abc")
    assert [queue.pop() for _ in range(len(queue))] == sorted(waiting)
    assert not queue._levels
    assert not queue._owned


@given(st.integers(1, 40), st.integers(1, 40))
def test_of_two_that_wait_neither_gets_more_than_one_turn_ahead(num_a, num_b):
    queue = FairQueue()
    for _ in range(num_a):
        add(queue, "a")
    for _ in range(num_b):
        add(queue, "b")
    served = Counter()
    for _ in range(2 * min(num_a, num_b)):
        served[queue.pop().owner] += 1
        assert abs(served["a"] - served["b"]) <= 1
