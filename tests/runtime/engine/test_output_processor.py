"""Outputs delivered twice, late or overlapping change nothing; after a stop string nothing counts."""

from functools import partial

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lamina import EngineError, SamplingParams
from lamina.runtime.engine.logprobs import LogprobsFormatter
from lamina.runtime.engine.output_processor import Answer, OutputProcessor, Reader
from lamina.runtime.protocol.engine_output import EngineOutput, Finish, Timeline
from lamina.runtime.protocol.scheduler_output import TokenLogprobs
from lamina.runtime.tokenization.detokenizer import detokenizer_of
from lamina.runtime.tokenization.tokenizer import Tokenizer

PROMPT = (1, 2)
WORDS = st.lists(
    st.sampled_from(["hello", " world", "é", "你", "🙂", "stop", "s", "t", "x", " "]), max_size=8
)
TIMES = Timeline(queued=1.0, first_token=2.0, finished=3.0)


@pytest.fixture(scope="module")
def tokenizer(bbpe_tokenizer):
    return Tokenizer(bbpe_tokenizer())


def answer_of(tokenizer, **params):
    made = SamplingParams(**params).resolve(None, seed=0)
    return Answer(
        request_id="a",
        asked_id="a",
        new_detokenizer=None if tokenizer is None else partial(detokenizer_of, made, PROMPT, tokenizer),
        stop_token_ids=frozenset(made.stop_token_ids or ()),
    )


def report(token_id, place):
    return TokenLogprobs(token_ids=(token_id,), logprobs=(-float(place),), rank=1)


def output(ids, start, stop, finish=None):
    """What the core sends of an answer's tokens start to stop - 1, and of its end."""
    return EngineOutput(
        request_id="a",
        num_before=start,
        new_token_ids=tuple(ids[start:stop]),
        logprobs=tuple(report(ids[place], place) for place in range(start, stop)),
        finish=finish,
    )


def state(answer):
    logprobs = [entry.logprobs for entry in answer.logprobs]
    return answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason, logprobs, answer.published


def delivered(answer, batches):
    """The answer after these batches of outputs, what they ask to be ended, and the deltas read meanwhile."""
    processor, reader, stops, deltas = OutputProcessor(), Reader(answer), [], []
    processor.add(answer)
    for batch in batches:
        stops += processor.process(batch)
        while (delta := reader.next()) is not None:
            deltas.append(delta)
    assert not processor._answers
    return stops, deltas


def token_by_token(ids, finish):
    """As the core sends them where nothing is sent again."""
    steps = [[output(ids, place, place + 1)] for place in range(len(ids) - 1)]
    return [*steps, [output(ids, max(len(ids) - 1, 0), len(ids), finish)]]


@st.composite
def deliveries(draw, ids, finish):
    """The same tokens by any outputs that the core may send.

    Each may begin earlier than the last one ended, and come again, at once or long after. An id that stops
    comes with the end, which is last.
    """
    most = len(ids) - (finish.reason == "stop")
    batches, sent, before = [], [], 0
    for known in sorted(draw(st.lists(st.integers(0, most), max_size=5))):
        sent.append(output(ids, draw(st.integers(0, before)), known))
        batches.append([sent[-1], *draw(st.lists(st.sampled_from(sent), max_size=2))])
        before = known
    last = output(ids, draw(st.integers(0, before)), len(ids), finish)
    return [*batches, [last, *draw(st.lists(st.sampled_from([*sent, last]), max_size=2))]]


@given(words=WORDS, stop=st.sampled_from([None, "stop", ["t", "你"], " w"]), data=st.data())
def test_outputs_that_come_twice_or_overlap_change_nothing(tokenizer, words, stop, data):
    ids = tokenizer.encode("".join(words), add_special_tokens=False)
    reason = data.draw(st.sampled_from(["length", "stop", "abort"])) if ids else "abort"
    if reason == "stop":
        ids = [*ids, 2]  # an EOS
    finish = Finish(reason=reason, times=TIMES)
    right, got = answer_of(tokenizer, stop=stop), answer_of(tokenizer, stop=stop)
    _, right_deltas = delivered(right, token_by_token(ids, finish))
    stops, deltas = delivered(got, data.draw(deliveries(ids, finish)))
    assert state(got) == state(right)
    for read in (deltas, right_deltas):  # an end that comes alone has a delta of its own
        assert "".join(delta.text for delta in read) == right.text
        assert [token for delta in read for token in delta.token_ids] == right.token_ids
        assert [delta.finish_reason for delta in read] == [None] * (len(read) - 1) + [right.finish_reason]
    assert {each.stop_string for each in stops} <= {right.stop_string} - {None}


@given(words=WORDS, stop=st.sampled_from([None, "stop", ["t", "你"]]), data=st.data())
def test_pieces_merged_in_any_way_join_to_the_whole(tokenizer, words, stop, data):
    ids = tokenizer.encode("".join(words), add_special_tokens=False)
    answer, processor, pieces = answer_of(tokenizer, stop=stop), OutputProcessor(), []
    answer.formatter = LogprobsFormatter(num_top=0)
    reader = Reader(answer)
    processor.add(answer)
    fails = data.draw(st.booleans())
    end = Finish(reason="abort", times=TIMES, error=EngineError("fell over") if fails else None)
    for batch in [*token_by_token(ids, None), [output(ids, len(ids), len(ids), end)]]:
        processor.process(batch)
        for read in data.draw(st.lists(st.sampled_from([reader.next, reader.read]), max_size=3)):
            pieces.append(read())
    while (piece := reader.read()) is not None:
        pieces.append(piece)
    deltas = [piece for piece in pieces if piece is not None]
    assert "".join(delta.text for delta in deltas) == answer.text
    assert [token for delta in deltas for token in delta.token_ids] == answer.token_ids
    assert [list(own) for delta in deltas for own in delta.logprobs] == [
        [token] for token in answer.token_ids
    ]
    assert reader.is_done
    assert reader.error is answer.error
    ends = [delta.finish_reason for delta in deltas]
    assert (
        ends == [None] * len(ends)
        if answer.error
        else ends == [None] * (len(ends) - 1) + [answer.finish_reason]
    )


@given(words=WORDS, stop=st.sampled_from([None, "stop", ["t", "你"]]), data=st.data())
def test_text_read_by_itself_and_deltas_join_to_the_whole(tokenizer, words, stop, data):
    ids = tokenizer.encode("".join(words), add_special_tokens=False)
    answer, processor = answer_of(tokenizer, stop=stop), OutputProcessor()
    reader, text, num_tokens = Reader(answer), "", 0
    processor.add(answer)
    end = Finish(reason="abort", times=TIMES)
    for batch in [*token_by_token(ids, None), [output(ids, len(ids), len(ids), end)]]:
        processor.process(batch)
        for most in data.draw(st.lists(st.sampled_from([0, 1, 2, 100]), max_size=3)):
            begun, unread = num_tokens > 0, answer.published.num_tokens - num_tokens
            if most and (found := reader.read_text(most)) is not None:
                assert begun
                assert found[1] == unread <= most
                assert not answer.published.is_over
                text, num_tokens = text + found[0], num_tokens + found[1]
            elif most == 0 and (delta := reader.read()) is not None:
                text, num_tokens = text + delta.text, num_tokens + len(delta.token_ids)
    while (delta := reader.read()) is not None:
        text, num_tokens = text + delta.text, num_tokens + len(delta.token_ids)
    assert reader.read_text(100) is None
    assert (text, num_tokens) == (answer.text, len(answer.token_ids))


@given(words=WORDS, stop=st.sampled_from(["stop", "t", "你", " w"]), min_tokens=st.integers(0, 9))
def test_what_follows_a_stop_string_is_dropped_whatever_the_core_ended_by(tokenizer, words, stop, min_tokens):
    ids = tokenizer.encode("".join(words), add_special_tokens=False)
    params = {"stop": stop, "min_tokens": min_tokens}
    detokenizer = detokenizer_of(SamplingParams(**params).resolve(None, seed=0), PROMPT, tokenizer)
    text = detokenizer.append(ids)
    number = detokenizer.num_tokens
    assume(detokenizer.stop_reason is not None)
    for reason in ("length", "abort"):
        answer = answer_of(tokenizer, **params)
        stops, deltas = delivered(answer, token_by_token(ids, Finish(reason=reason, times=TIMES)))
        assert (answer.text, answer.token_ids) == (text, ids[:number])
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        assert len(answer.logprobs) == number
        assert {each.stop_string for each in stops} == ({stop} if number < len(ids) else set())
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]


def test_a_stop_is_said_until_the_core_confirms_it_and_published_with_its_end(tokenizer):
    ids = tokenizer.encode("a stop b", add_special_tokens=False)
    place = len(tokenizer.encode("a stop", add_special_tokens=False))
    answer, processor = answer_of(tokenizer, stop="stop"), OutputProcessor()
    processor.add(answer)
    assert processor.process([output(ids, 0, place)]) == [("a", "stop")]
    assert processor.process([output(ids, 0, place + 1)]) == [("a", "stop")]
    assert not answer.published.is_over
    assert (
        processor.process(
            [output(ids, place + 1, place + 2, Finish(reason="stop", stop_reason="stop", times=TIMES))]
        )
        == []
    )
    assert (answer.text, answer.token_ids, answer.published) == ("a ", ids[:place], (place, True))
    assert processor.process([output(ids, 0, len(ids))]) == [], "it is forgotten"


def test_a_text_that_cannot_be_made_ends_its_request_and_no_other(tokenizer):
    class Broken:
        stop_reason = None

        def append_token(self, token_id):
            raise ValueError("lost")

    good, bad, processor = answer_of(tokenizer), answer_of(None), OutputProcessor()
    bad.request_id, bad.new_detokenizer = "bad", Broken
    for answer in (bad, good):
        processor.add(answer)
    ids = tokenizer.encode("hello", add_special_tokens=False)
    outputs = [EngineOutput(request_id="bad", num_before=0, new_token_ids=(5,)), output(ids, 0, len(ids))]
    assert processor.process(outputs) == [("bad", None)]
    assert processor.process(outputs) == [("bad", None)]
    assert isinstance(bad.error, EngineError)
    assert "the text of this answer could not be made: ValueError('lost')" in str(bad.error)
    assert (good.text, good.published) == ("hello", (len(ids), False))
    end = Finish(reason="abort", times=TIMES)
    processor.process(
        [EngineOutput(request_id="bad", num_before=0, finish=end), output(ids, 0, len(ids), end)]
    )
    assert not processor._answers


def test_an_output_that_was_lost_ends_its_request_with_an_error(tokenizer):
    answer, processor = answer_of(None), OutputProcessor()
    processor.add(answer)
    assert processor.process([output([5, 6, 7], 2, 3)]) == [("a", None)]
    assert "an output was lost" in str(answer.error)
