"""Plans are plain data: another process can receive them, whatever a caller brought along."""

import pickle

import numpy


def test_a_plan_is_plain_data(make_server):
    server = make_server(blocks=8)
    server.add("a", 5, min_tokens=2, stop_token_ids=[1])
    plan = server.launch()
    sent = pickle.loads(pickle.dumps(plan))
    for name in plan.__struct_fields__:
        was, now = getattr(plan, name), getattr(sent, name)
        assert numpy.array_equal(was, now) if isinstance(was, numpy.ndarray) else was == now, name


def test_a_plan_names_requests_with_logits_processors_and_carries_no_code(make_server):
    server = make_server(blocks=8)
    server.add("a", 5, logits_processors=[lambda prompt, answer, logits: logits], logit_bias={3: 2.0})
    adjusted = pickle.loads(pickle.dumps(server.launch())).adjusted
    (history,) = adjusted.histories
    assert (history.request_id, len(history.prompt_token_ids), history.output_token_ids) == ("a", 5, ())
    assert [(own.logits_processors, own.logit_bias) for own in adjusted.params] == [(None, {3: 2.0})]
