"""Requests, calls and losses among several engines: what each is sent, and what comes of it."""

import pytest

from lamina import EngineDeadError, LoadError, RequestError, UnsupportedError
from lamina.runtime.data_parallel.member import Member
from lamina.runtime.protocol.core_messages import AbortRequests, Reply

from .cores import Books, Core, finished


def test_answers_to_one_prompt_stay_together_and_an_abort_finds_each():
    books = Books()
    assert books.add("a", "b", "c") == 0
    assert books.add("d") == 1
    assert [core.requests for core in books.cores] == [["a", "b", "c"], ["d"]]
    books.replicas.send(AbortRequests(request_ids=("b", "d", "gone"), reason="stop", stop_reason="x"))
    ends = [core.sent[-1] for core in books.cores]
    assert [(end.request_ids, end.reason, end.stop_reason) for end in ends] == [
        (("b",), "stop", "x"),
        (("d",), "stop", "x"),
    ]


def test_an_end_frees_its_engine():
    books = Books()
    books.add("a", "b")
    books.add("c")
    for request_id in "ab":
        books.cores[0].say(finished(request_id))
    assert [report.num_requests for report in books.replicas.reports()] == [0, 1]
    assert books.add("d") == 0


def test_what_all_are_asked_is_one_reply_once_all_have_answered():
    books = Books()
    books.call("is_sleeping")
    books.cores[1].answer(True)
    assert books.said == []
    books.cores[0].answer(True)
    assert books.said == [Reply(number=1, value=True)]


def test_one_engine_alone_is_asked_where_that_is_enough_or_wanted():
    books = Books()
    books.call("explain")
    books.call("stats", number=2, engine=1)
    assert [[call.method for call in core.calls] for core in books.cores] == [["explain"], ["stats"]]
    books.cores[1].answer({"blocks": 1})
    books.cores[0].answer("text")
    assert books.said == [Reply(number=2, value={"blocks": 1}), Reply(number=1, value="text")]
    books.call("stats", number=3, engine=7)
    assert "engine is 7" in str(books.said[-1].error)


def test_the_first_engines_error_is_that_of_all():
    books = Books()
    books.call("nonsense")
    errors = [UnsupportedError("0"), UnsupportedError("1")]
    books.cores[1].answer(error=errors[1])
    books.cores[0].answer(error=errors[0])
    assert books.said == [Reply(number=1, error=errors[0])]


def test_a_lost_engine_ends_its_requests_alone_and_leaves_calls_to_the_others():
    books = Books()
    books.add("a", "b")
    books.add("c")
    books.call("is_sleeping")
    books.cores[1].answer(False)
    books.cores[0].die()
    assert books.said[-1] == Reply(number=1, value=False)
    assert {*books.ended()} == {"a", "b"}
    for error in books.ended().values():
        assert isinstance(error, EngineDeadError)
        assert "engine 0 is lost: it was killed" in str(error)
    assert [member.number for member in books.lost] == [0]
    assert [report.state for report in books.replicas.reports()] == ["lost", "serving"]
    assert books.replicas.status().is_alive
    assert books.replicas.status().reason is None
    assert [books.add(each) for each in "defg"] == [1] * 4
    books.cores[1].die()
    assert books.said[-1] is None
    assert not books.replicas.status().is_alive
    assert len(books.lost) == 1, "nothing is started anew once all are lost"
    with pytest.raises(EngineDeadError, match="no engine takes requests: engine 0 is lost"):
        books.add("h")


def test_a_call_of_an_engine_that_is_lost_meanwhile_is_an_error():
    books = Books()
    books.call("stats", engine=0)
    books.cores[0].die()
    assert "engine 0 is lost" in str(books.said[-1].error)


def test_a_drained_engine_gets_nothing_new_and_finishes_what_it_has():
    books = Books()
    books.add("a")
    books.replicas.drain(0)
    assert [books.add(each) for each in "bcd"] == [1] * 3
    assert [report.state for report in books.replicas.reports()] == ["draining", "serving"]
    with pytest.raises(RequestError, match="the last that takes requests"):
        books.replicas.drain(1)
    books.cores[0].say(finished("a"))
    assert books.replicas.reports()[0].state == "drained"
    books.call("sleep", 1)
    assert books.cores[0].calls, "what all are to be, a drained one is too"
    books.replicas.resume(0)
    assert books.add("e") == 0
    for wrong in (2, -1):
        with pytest.raises(RequestError, match=f"engine is {wrong}; wanted one of 0 to 1"):
            books.replicas.drain(wrong)


def test_where_only_drained_engines_are_left_requests_are_refused_and_the_reason_said():
    books = Books()
    books.replicas.drain(0)
    books.cores[1].die()
    with pytest.raises(EngineDeadError, match="engine 1 is lost: it was killed; engine 0 is drained"):
        books.add("a")
    status = books.replicas.status()
    assert status.is_alive
    assert status.reason == "engine 1 is lost: it was killed; engine 0 is drained"


def test_an_engine_that_hangs_is_given_nothing_while_others_do_not():
    books = Books()
    books.cores[0].hangs = "it has said nothing"
    assert [books.add(each) for each in "ab"] == [1, 1]
    assert books.replicas.status().reason is None
    books.cores[1].hangs = "it has said nothing"
    assert books.add("c") == 0


def test_weights_that_one_engine_could_not_take_end_that_engine():
    books = Books()
    books.call("update_weights", "folder", "/new")
    books.cores[0].answer()
    books.cores[1].answer(error=LoadError("disk"))
    assert isinstance(books.said[-1].error, LoadError)
    assert [core.is_dropped for core in books.cores] == [False, True]
    assert books.replicas.kept.calls() == [("update_weights", ("folder", "/new"))]


def test_an_adapter_that_one_engine_could_not_load_is_loaded_nowhere():
    books = Books()
    books.call("load_adapter", "/adapter")
    books.cores[0].answer({"digest": "d"})
    books.cores[1].answer(error=LoadError("disk"))
    assert [(call.method, call.arguments) for call in books.cores[0].calls][1:] == [
        ("unload_adapter", ("d",))
    ]
    assert books.replicas.kept.calls() == []
    books.cores[0].answer()  # to nobody
    assert isinstance(books.said[-1].error, LoadError)


def test_each_engine_has_ranks_of_its_own_in_a_trainers_group():
    books = Books(num_ranks=2)
    group = {"port": 1, "rank": 1, "world_size": 5}
    books.call("update_weights", "group", group)
    assert [core.calls[-1].arguments[1]["rank"] for core in books.cores] == [1, 3]
    for core in books.cores:
        core.answer()
    books.call("update_weights", "group", group | {"world_size": 4}, number=2)
    assert "world_size is 4; wanted at least 5" in str(books.said[-1].error)
    books.cores[1].die()
    books.call("update_weights", "group", group, number=3)
    assert "would wait for an engine that is not there: engine 1 is lost" in str(books.said[-1].error)
    assert len(books.cores[0].calls) == 1


def test_what_no_process_could_have_taken_with_it_keeps_a_lost_engine_out():
    kept = Books().replicas.kept
    assert kept.obstacle is None
    books = Books()
    for method, arguments, value in (
        ("load_adapter", ("/one",), {"digest": "1"}),
        ("load_adapter", ("/two",), {"digest": "2"}),
        ("unload_adapter", ("1",), None),
        ("update_weights", ("folder", "/new"), None),
    ):
        books.call(method, *arguments)
        for core in books.cores:
            core.answer(value)
    kept = books.replicas.kept
    assert kept.calls() == [("update_weights", ("folder", "/new")), ("load_adapter", ("/two",))]
    assert kept.obstacle is None
    books.call("sleep", 1)
    for core in books.cores:
        core.answer()
    assert "sleep" in kept.obstacle
    books.call("wake")
    books.call("update_weights", "file", "/gone", number=2)
    for core in books.cores:
        first, second = core.calls[-2:]
        core.say(Reply(number=first.number))
        core.say(Reply(number=second.number))
    assert "came from a trainer" in kept.obstacle


def test_a_new_engine_joins_unless_it_died_or_others_were_changed_meanwhile():
    books = Books()
    books.cores[0].die()
    core = Core()
    member = Member(0, core)
    member.start(books.replicas.take)
    version = books.replicas.kept.version
    books.call("update_weights", "folder", "/new")
    assert not books.replicas.join(member, version), "others are being changed"
    books.cores[1].answer()
    assert not books.replicas.join(member, version), "others were changed"
    assert books.replicas.join(member, books.replicas.kept.version)
    assert books.add("a") == 0
    assert core.requests == ["a"]
    core.die()
    assert "a" in books.ended()
    dead = Member(0, Core())
    dead.start(books.replicas.take)
    dead.core.die()
    assert not books.replicas.join(dead, books.replicas.kept.version)


def test_what_could_not_be_sent_is_no_load():
    books = Books()

    def refuse(command):
        raise ValueError

    books.cores[0].send = refuse
    with pytest.raises(ValueError):
        books.add("a")
    assert books.router.loads == [0, 0]


def test_prefixes_are_forgotten_with_the_caches_that_held_them():
    books = Books()
    prompt = tuple(range(8))
    assert books.add("a", prompt=prompt) == 0
    books.cores[0].say(finished("a"))
    assert books.add("b", prompt=prompt) == 0
    books.cores[0].say(finished("b"))
    books.call("sleep", 1)
    for core in books.cores:
        core.answer()
    assert books.add("c", prompt=prompt) == 1
