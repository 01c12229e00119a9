"""The core alone, as another thread or process would have it: pickled requests in, pickled outputs out."""

import contextlib
import dataclasses
import pickle
import queue
import threading

import pytest

from lamina import EngineError, RequestError, SamplingParams
from lamina.runtime.engine.output_processor import OutputProcessor, Reader
from lamina.runtime.engine.parallel_sampling import new_deltas
from lamina.runtime.request_options import RequestOptions

PROMPTS = ["hello", [5, 6, 7], "the world", [11] * 20]
DRAWN = {"temperature": 0.9, "seed": 5, "max_tokens": 24}


class CoreElsewhere:
    """A core that a thread of its own steps, reached by bytes alone."""

    def __init__(self, core):
        self._core = core
        self._inbox, self.outbox = queue.SimpleQueue(), queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def call(self, name, *args):
        self._inbox.put(pickle.dumps((name, args)))

    def join(self):
        self._inbox.put(pickle.dumps(None))
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()

    def _serve(self):
        while True:
            while not (self._core.has_work and self._inbox.empty()):
                message = pickle.loads(self._inbox.get())
                if message is None:
                    return
                name, args = message
                getattr(self._core, name)(*args)
                self._send()
            self._core.step()
            self._send()

    def _send(self):
        sent = []
        while self._core.outputs:
            sent.append(self._core.outputs.popleft())
        if sent:
            self.outbox.put(pickle.dumps(sent))


class Caller:
    """The text side: nothing of the core but what comes out of its outbox, some of it twice."""

    def __init__(self, core):
        self._core = core
        self._processor = OutputProcessor()
        self._last = []

    def submit(self, submissions):
        for request, answer in submissions:
            self._processor.add(answer)
            self._core.call("add", request)

    def receive(self):
        outputs = pickle.loads(self._core.outbox.get(timeout=60))
        for request_id, stop_string in self._processor.process([*outputs, *self._last, *outputs]):
            reason = "abort" if stop_string is None else "stop"
            self._core.call("abort", request_id, reason, stop_string)
        self._last = outputs

    def run(self, submissions):
        self.submit(submissions)
        while not all(answer.published.is_over for _, answer in submissions):
            self.receive()


@pytest.fixture(scope="module")
def runtime(tiny_text_folder):
    from lamina import Runtime

    with Runtime.from_pretrained(tiny_text_folder, compile=False, block_size=4) as runtime:
        yield runtime


@contextlib.contextmanager
def calling(runtime):
    """A caller of the runtime's own core in a thread, while the runtime's client sits still."""
    elsewhere = CoreElsewhere(runtime._client._core)
    try:
        yield Caller(elsewhere)
    finally:
        elsewhere.join()


WAYS = {
    "greedy": {"temperature": 0, "max_tokens": 12},
    "drawn": DRAWN,
    "stop strings": DRAWN | {"stop": ["h", "x", "z1"], "max_tokens": 60},
    "a stop string that stays": DRAWN | {"stop": "e", "include_stop_str_in_output": True, "max_tokens": 60},
    "stop ids": DRAWN | {"stop_token_ids": list(range(0, 260, 9)), "min_tokens": 2},
    "log-probabilities": DRAWN | {"logprobs": 3, "prompt_logprobs": 2, "stop": "q"},
    "many": DRAWN | {"n": 3, "stop": "h", "max_tokens": 40},
    "the best": DRAWN | {"n": 2, "best_of": 5, "max_tokens": 9},
    "penalties": DRAWN | {"presence_penalty": 1.0, "logit_bias": {7: 2.0}, "bad_words": ["he"]},
    "no text": DRAWN | {"detokenize": False, "logprobs": 0},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_core_in_another_thread_gives_the_answers_that_generate_gives(runtime, way):
    params = SamplingParams(**WAYS[way])
    right = runtime.generate(PROMPTS, params)
    asked = [*runtime._input.prepare_each(PROMPTS, params, RequestOptions())]
    with calling(runtime) as caller:
        caller.run([submission for answers in asked for submission in answers.submissions])
    got = [answers.output() for answers in asked]
    for output, wanted in zip(got, right, strict=True):
        assert output.outputs == wanted.outputs
        assert output.prompt_logprobs == wanted.prompt_logprobs
        assert (output.prompt, output.prompt_token_ids) == (wanted.prompt, wanted.prompt_token_ids)
        assert output.times.queued <= output.times.first_token <= output.times.finished
    assert runtime._client._core._live == {}


@pytest.mark.parametrize("way", ["drawn", "stop strings", "log-probabilities", "many", "no text"])
def test_a_core_in_another_thread_streams_what_stream_does(runtime, way):
    params = SamplingParams(**WAYS[way])
    right = list(runtime.stream(PROMPTS[0], params))
    asked = runtime._input.prepare_stream(PROMPTS[0], params, RequestOptions())
    readers, deltas = [Reader(answer) for answer in asked.answers], []
    with calling(runtime) as caller:
        caller.submit(asked.submissions)
        while not all(reader.is_done for reader in readers):
            caller.receive()
            deltas += new_deltas(readers)
    anonymous = [[dataclasses.replace(delta, request_id="") for delta in each] for each in (deltas, right)]
    got, wanted = (sorted(each, key=lambda delta: delta.index) for each in anonymous)
    assert got == wanted


def test_a_deadline_and_an_error_travel(runtime, monkeypatch):
    def fail():
        raise ValueError("odd")

    def answer_of(**options):
        params = SamplingParams(max_tokens=60)
        (asked,) = runtime._input.prepare_each([[7] * 9], params, RequestOptions(**options))
        (submission,) = asked.submissions
        caller.run([submission])
        return submission.answer

    with calling(runtime) as caller:
        late = answer_of(timeout=1e-9)
        assert (late.finish_reason, late.stop_reason) == ("abort", "deadline")
        monkeypatch.setattr(runtime._client._core.scheduler, "schedule", fail)
        failed = answer_of()
    assert isinstance(failed.error, EngineError)
    assert "which ends alone: ValueError('odd')" in str(failed.error)


def request_for(runtime, params):
    """The request of one prompt."""
    (asked,) = runtime._input.prepare_each([[5]], params, RequestOptions())
    return asked.submissions[0].request


def test_calls_by_the_id_of_no_request_change_nothing(runtime):
    core = runtime._client._core
    assert not core.has_work
    assert core.abort("nobody") is False
    core.step()
    assert not core.outputs


def test_an_id_that_is_live_is_refused_and_the_one_that_has_it_goes_on(runtime, is_idle):
    core = runtime._client._core
    request = request_for(runtime, SamplingParams(max_tokens=3))
    core.add(request)
    with pytest.raises(RequestError, match="is in use"):
        core.add(request)
    while core.has_work:
        core.step()
    outputs = [*core.outputs]
    core.outputs.clear()
    assert [output.request_id for output in outputs] == [request.request_id] * len(outputs)
    assert outputs[-1].finish is not None
    is_idle(runtime)


def test_who_wants_no_token_gets_one_output_at_the_end(runtime):
    """So that a step costs the host nothing for those whom nobody watches."""
    core, params = (
        runtime._client._core,
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1),
    )
    for detokenize, num_outputs in ((False, 1), (True, 6)):
        core.add(request_for(runtime, dataclasses.replace(params, detokenize=detokenize)))
        while core.has_work:
            core.step()
        outputs = [*core.outputs]
        core.outputs.clear()
        assert len(outputs) == num_outputs
        assert sum(len(output.new_token_ids) for output in outputs) == 6
        assert sum(len(output.logprobs) for output in outputs) == 6
        assert [output.finish is not None for output in outputs] == [False] * (num_outputs - 1) + [True]
