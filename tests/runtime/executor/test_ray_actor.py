"""What goes on between an executor and a rank's actor, without Ray: messages once and in order."""

import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import Runtime, UnsupportedError
from lamina.runtime.executor import ray_actor
from lamina.runtime.executor.ray_actor import ActorLine, interface_of
from lamina.runtime.protocol import wire
from lamina.runtime.protocol.worker_messages import RemoveRequest

from ..engine.processes import wait_until


def message(number: int) -> RemoveRequest:
    return RemoveRequest(request_id=str(number))


@given(st.data())
def test_messages_are_taken_once_and_in_order_however_they_are_brought(data: st.DataObject) -> None:
    line, num = ActorLine(0, 1), data.draw(st.integers(1, 8))
    brought = data.draw(st.permutations([*range(num), *data.draw(st.lists(st.integers(0, num - 1)))]))
    taken = []
    for number in brought:
        line.put(number, wire.encode(message(number)))
        if data.draw(st.booleans()):
            taken += [found for found in [line.take(0)] if found is not None]
    taken += [line.take(0) for _ in range(num - len(taken))]
    assert taken == [message(number) for number in range(num)]
    assert line.take(0) is None


@given(st.lists(st.sampled_from(["say", "ask", "ask in vain"])))
def test_answers_are_had_once_and_in_order_however_often_they_are_asked_for(moves: list[str]) -> None:
    line, num_said, had = ActorLine(0, 1), 0, []
    for move in moves:
        if move == "say":
            line.send(message(num_said))
            num_said += 1
        elif num_said > len(had):  # else it would wait
            answers = line.said_from(len(had))
            assert answers.first == len(had)
            if move == "ask":
                had += map(wire.decode, answers.frames)
    line.end()
    answers = line.said_from(len(had))
    assert answers.has_ended
    assert [*had, *map(wire.decode, answers.frames)] == [message(number) for number in range(num_said)]


def test_who_asks_anew_lets_the_call_before_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actor, "POLL_SECONDS", 250.0)
    line, heard = ActorLine(0, 1), []

    def ask() -> None:
        heard.append(len(line.said_from(0).frames))

    older, newer = threading.Thread(target=ask), threading.Thread(target=ask)
    older.start()
    wait_until(lambda: line._num_asked == 1)
    newer.start()
    older.join(200)
    assert heard == [0]
    line.send(message(0))
    newer.join(200)
    assert heard == [0, 1]


def test_an_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None
    assert interface_of("::1") is None


def test_without_the_package_it_is_said_what_to_install(tiny_text_folder, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UnsupportedError, match=r"pip install 'lamina\[ray\]'"):
        Runtime.from_pretrained(tiny_text_folder, executor="ray", device="cpu", num_kv_blocks=8)


def test_the_address_of_a_ray_client_is_refused(tiny_text_folder, monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://somewhere:10001")
    with pytest.raises(UnsupportedError, match=r"RAY_ADDRESS is 'ray://somewhere:10001'; wanted host:port"):
        Runtime.from_pretrained(tiny_text_folder, executor="ray", device="cpu", num_kv_blocks=8)
