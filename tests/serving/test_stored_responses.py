"""Stored responses: each key's own, bounded, for a time; found while they run."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.serving.errors import ApiError
from lamina.serving.stored_responses import OVERHEAD, Responses, Stored

KEYS = ("one", "two")


def in_loop(test: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await test()

    asyncio.run(whole())


def stored(key: str, name: str, num_bytes: int = 0, *, is_kept: bool = True) -> Stored:
    return Stored(key=key, id=name, response=b"x" * num_bytes, turns=b"", is_kept=is_kept)


@given(
    asked=st.lists(
        st.tuples(
            st.sampled_from(KEYS),
            st.booleans(),  # kept
            st.integers(0, 3000),  # bytes when it begins
            st.integers(0, 3000),  # and once it has ended
            st.sampled_from(["end", "drop", "forget", "run on"]),
        ),
        max_size=40,
    )
)
def test_a_key_holds_no_more_than_its_room_and_the_newest(asked: list[tuple[Any, ...]]) -> None:
    most = 4 * OVERHEAD

    async def check() -> None:
        responses = Responses(max_bytes=most, seconds=60)
        made: list[Stored] = []
        for number, (key, is_kept, before, after, then) in enumerate(asked):
            made.append(stored(key, str(number), before, is_kept=is_kept))
            responses.begin(made[-1])
            assert responses.running(key, str(number)) is made[-1]
            assert (responses.kept(key, str(number)) is made[-1]) == is_kept
            if then == "forget":
                responses.forget(made[-1])
            elif then == "drop":
                responses.drop(made[-1])
            elif then == "end":
                responses.end(made[-1], answer=b"y" * after, turns=b"")
            for name in KEYS:
                kept = [each for each in made if responses.kept(name, each.id) is each]
                assert responses.num_bytes(name) == sum(each.num_bytes for each in kept)
                assert responses.num_bytes(name) <= most or len(kept) == 1
        running = [each for each in made if not each.ended.is_set()]
        assert responses.num_running == len(running)
        for each in made:
            responses.drop(each)
        assert not responses.num_running
        assert not any(map(responses.num_bytes, KEYS))

    in_loop(check)


def test_one_key_takes_no_room_of_another() -> None:
    async def check() -> None:
        responses = Responses(max_bytes=3 * OVERHEAD, seconds=60)
        responses.begin(stored("one", "a"))
        for number in range(50):
            responses.begin(stored("two", str(number)))
        assert responses.find("one", "a").id == "a"
        with pytest.raises(ApiError) as caught:
            responses.find("one", "49")
        assert (caught.value.status, caught.value.code) == (404, "response_not_found")

    in_loop(check)


def test_a_response_is_forgotten_once_its_time_has_passed() -> None:
    async def check() -> None:
        responses = Responses(max_bytes=2**20, seconds=0.01)
        kept = stored("one", "a")
        responses.begin(kept)
        while responses.kept("one", "a"):
            await asyncio.sleep(0.01)
        responses.end(kept, answer=b"late", turns=b"")
        assert responses.kept("one", "a") is None
        assert responses.num_bytes("one") == responses.num_running == 0

    in_loop(check)


def test_what_does_not_fit_is_refused_by_name() -> None:
    responses = Responses(max_bytes=5000, seconds=60)
    responses.check_room(5000 - OVERHEAD)
    with pytest.raises(ApiError) as caught:
        responses.check_room(5001 - OVERHEAD)
    assert "max_stored_bytes" in caught.value.message
    assert (caught.value.status, caught.value.param) == (400, "store")
