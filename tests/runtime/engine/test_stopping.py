"""Where answers end and why, and which settings of a model apply, through a model whose answers are given."""

import pytest

from lamina import BeamSearchParams, SamplingParams

FLAT = [[0.0] * 320]


def answer(runtime, params=None, **settings):
    params = params or SamplingParams(**{"temperature": 0, "max_tokens": 12} | settings)
    return runtime.generate([[0]], params)[0].outputs[0]


@pytest.mark.parametrize("token", [5, 6, 7])
def test_every_source_of_eos_ids_counts(scripted, bbpe_tokenizer, token):
    tokenizer = bbpe_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(7)
    files = {"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": [6]}}
    runtime = scripted([40, token, 41], files=files, tokenizer=tokenizer)
    assert runtime.stats()["resolved"]["eos_token_ids"] == [5, 6, 7]
    got = answer(runtime)
    assert (got.token_ids, got.finish_reason, got.stop_reason) == ((40, token), "stop", None)


def test_an_eos_of_the_generation_config_stops_and_is_not_in_the_text(scripted, worded):
    tokenizer, (hi, end) = worded("Hi", "END")
    runtime = scripted(
        [hi, end, hi], files={"generation_config.json": {"eos_token_id": [2, end]}}, tokenizer=tokenizer
    )
    got = answer(runtime)
    assert (got.text, got.token_ids, got.finish_reason) == ("Hi", (hi, end), "stop")


@pytest.mark.parametrize("wanted", [None, "\ufffd"])
def test_a_stop_string_in_a_character_that_max_tokens_cuts_apart_wins_over_the_length(
    scripted, bbpe_tokenizer, wanted
):
    tokenizer = bbpe_tokenizer()
    ids = tokenizer.encode("h日", add_special_tokens=False)
    got = answer(scripted([*ids, 40], tokenizer=tokenizer), stop=wanted, max_tokens=len(ids) - 1)
    assert got.token_ids == tuple(ids[:-1])
    ends = ("h\ufffd", "length", None) if wanted is None else ("h", "stop", wanted)
    assert (got.text, got.finish_reason, got.stop_reason) == ends


def test_ignore_eos_goes_on_to_the_callers_stop_ids_or_the_length(scripted):
    files = {"generation_config.json": {"eos_token_id": [2, 7]}}
    runtime = scripted([7, 7, 7, 9], files=files)
    assert answer(runtime, ignore_eos=True, max_tokens=3).token_ids == (7, 7, 7)
    got = answer(runtime, ignore_eos=True, stop_token_ids=[9])
    assert (got.token_ids, got.finish_reason, got.stop_reason) == ((7, 7, 7, 9), "stop", 9)


def test_sampling_defaults_of_the_model_hold_where_a_request_says_nothing(scripted):
    files = {"generation_config.json": {"temperature": 0.1, "top_k": 1}}
    runtime, plain = scripted(FLAT, files=files), scripted(FLAT, files=files, generation_defaults=False)
    hot = SamplingParams(temperature=1.5, seed=3, max_tokens=8)
    assert runtime.stats()["resolved"]["sampling_defaults"]["top_k"] == 1
    assert plain.stats()["resolved"]["sampling_defaults"]["top_k"] is None
    assert set(answer(runtime, hot).token_ids) == {0}  # the model's top_k holds: the first of equals
    free = SamplingParams(temperature=1.5, seed=3, max_tokens=8, top_k=0)
    assert answer(runtime, free).token_ids == answer(plain, hot).token_ids
    assert len(set(answer(runtime, free).token_ids)) > 4
    assert set(answer(runtime, SamplingParams(max_tokens=8)).token_ids) == {0}


def test_the_ids_that_stop_and_the_sampling_defaults_are_logged_at_the_start(scripted, said):
    scripted([40], files={"generation_config.json": {"eos_token_id": [6], "temperature": 0.125}})
    lines = [line for line in said() if "[2, 6]" in line]
    assert len(lines) == 1
    assert "temperature 0.125" in lines[0]


@pytest.mark.parametrize("temperature", [0, 1])
def test_ids_that_the_tokenizer_has_not_are_never_sampled(scripted, bbpe_tokenizer, temperature):
    logits = [0.0] * 320
    logits[310], logits[45], logits[46] = 60.0, 30.0, 30.0
    runtime = scripted([logits], tokenizer=bbpe_tokenizer())
    outputs = runtime.generate(
        [[0]] * 4, SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True)
    )
    assert {token for output in outputs for token in output.outputs[0].token_ids} <= {45, 46}
    assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)


@pytest.mark.parametrize("temperature", [0, 1])
def test_greedy_rows_and_random_rows_share_a_batch_with_impossible_tokens(scripted, temperature):
    logits = [float("-inf")] * 320
    logits[45] = logits[46] = 1.0
    runtime = scripted([logits])
    greedy, other = (
        SamplingParams(temperature=0, max_tokens=8),
        SamplingParams(temperature=temperature, max_tokens=8),
    )
    outputs = runtime.generate([[0], [0], [0]], [greedy, other, greedy])
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids == (45,) * 8
    assert set(outputs[1].outputs[0].token_ids) <= {45, 46}


def test_until_min_tokens_the_ids_that_stop_give_way_to_the_next_best(scripted):
    logits = [0.0] * 320
    logits[2], logits[50] = 9.0, 8.0
    runtime = scripted([logits])
    assert answer(runtime).token_ids == (2,)
    assert answer(runtime, min_tokens=5).token_ids == (50,) * 5 + (2,)


def test_until_min_tokens_stop_strings_are_not_looked_for(scripted, worded):
    tokenizer, (x,) = worded("xyz")
    runtime = scripted([x], tokenizer=tokenizer)
    got = answer(runtime, stop="xyz", min_tokens=5)
    assert (len(got.token_ids), got.finish_reason, got.stop_reason) == (6, "stop", "xyz")
    assert len(answer(runtime, stop="xyz").token_ids) == 1


def test_a_stop_string_spread_over_tokens_never_leaks(scripted, worded):
    tokenizer, ids = worded("DEF", "G", "HI", "J", "K")
    runtime = scripted(ids, tokenizer=tokenizer)
    params = SamplingParams(temperature=0, max_tokens=12, stop=["DEFGHIJ"])
    got = answer(runtime, params)
    assert (got.text, got.finish_reason, got.stop_reason) == ("", "stop", "DEFGHIJ")
    assert got.token_ids == tuple(ids[:4])
    deltas = list(runtime.stream([0], params))
    assert "".join(delta.text for delta in deltas) == ""
    assert deltas[-1].finish_reason == "stop"
    assert answer(runtime, stop=["DEFGHX"], max_tokens=5).text == "DEFGHIJK"


@pytest.mark.parametrize("included, text", [(False, "a x"), (True, "a xstop")])
def test_a_stop_string_inside_a_token_cuts_the_text_there(scripted, worded, included, text):
    tokenizer, ids = worded("a ", "xstop!y")
    runtime = scripted([*ids, 40], tokenizer=tokenizer)
    got = answer(runtime, stop="stop", include_stop_str_in_output=included)
    assert (got.text, got.token_ids, got.stop_reason) == (text, tuple(ids), "stop")


def test_a_stop_string_that_is_a_special_token_stops_unseen(scripted, worded):
    tokenizer, (hi,) = worded("Hi")
    runtime = scripted([hi, 3, hi], tokenizer=tokenizer)  # 3 is <|end|>
    got = answer(runtime, stop=["<|end|>"])
    assert (got.text, got.token_ids, got.stop_reason) == ("Hi", (hi, 3), "<|end|>")


def test_a_stop_string_complete_in_the_last_allowed_token_is_a_stop(scripted, worded):
    tokenizer, (hi, end) = worded("Hi", "END")
    got = answer(scripted([hi, end], tokenizer=tokenizer), stop="END", max_tokens=2)
    assert (got.text, got.finish_reason, got.stop_reason) == ("Hi", "stop", "END")


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4])
def test_an_answer_cut_within_a_character_streams_what_decoding_it_at_once_gives(
    scripted, bbpe_tokenizer, num_bytes
):
    tokenizer = bbpe_tokenizer()
    ids = tokenizer.encode("🙂", add_special_tokens=False)
    assert len(ids) == 4
    runtime = scripted(ids, tokenizer=tokenizer)
    params = SamplingParams(temperature=0, max_tokens=num_bytes)
    text = answer(runtime, params).text
    assert text == tokenizer.decode(ids[:num_bytes])
    assert "".join(delta.text for delta in runtime.stream([0], params)) == text


def test_without_detokenizing_there_are_tokens_and_no_text(scripted, worded):
    tokenizer, (hi,) = worded("Hi")
    runtime = scripted([hi], tokenizer=tokenizer)
    got = answer(runtime, detokenize=False, max_tokens=2)
    assert (got.text, got.token_ids) == ("", (hi, hi))


@pytest.mark.parametrize("name", ["END", "</s>"])  # an ordinary token, and one that is hidden otherwise
def test_a_stop_token_is_in_the_text_where_stops_are_to_be_in_it(scripted, worded, name):
    tokenizer, (hi, end) = worded("Hi", "END")
    token = tokenizer.convert_tokens_to_ids(name) if name != "END" else end
    runtime = scripted([hi, token, hi], tokenizer=tokenizer)
    settings = {"stop_token_ids": [token], "ignore_eos": True}
    plain = answer(runtime, **settings)
    assert (plain.text, plain.token_ids, plain.stop_reason) == ("Hi", (hi, token), token)
    shown = answer(runtime, **settings, include_stop_str_in_output=True)
    assert (shown.text, shown.token_ids, shown.stop_reason) == (f"Hi{name}", (hi, token), token)
    params = SamplingParams(temperature=0, max_tokens=4, **settings, include_stop_str_in_output=True)
    assert "".join(delta.text for delta in runtime.stream([0], params)) == f"Hi{name}"


def test_an_answers_first_word_keeps_its_space_and_a_stop_string_may_begin_with_it(scripted, spm_tokenizer):
    tokenizer = spm_tokenizer()
    word, end = tokenizer.convert_tokens_to_ids(["▁wor", "."])
    runtime = scripted([0, word, end], tokenizer=tokenizer)  # after the two tokens of "hello"
    params = {"temperature": 0, "max_tokens": 2}
    whole = runtime.generate("hello", SamplingParams(**params))[0]
    assert whole.prompt + whole.outputs[0].text == "hello wor."
    stopped = runtime.generate("hello", SamplingParams(**params, stop=[" wor"]))[0].outputs[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("", "stop", " wor")
    assert "".join(delta.text for delta in runtime.stream("hello", SamplingParams(**params))) == " wor."
    beams = runtime.beam_search("hello", BeamSearchParams(beam_width=2, max_tokens=2))[0].outputs
    assert {beam.text[:4] for beam in beams if beam.token_ids[0] == word} == {" wor"}
