"""How a request's tokens are read."""

from hypothesis import given
from hypothesis import strategies as st

from lamina.runtime.sampling_params import SamplingParams
from lamina.runtime.scheduler.request import Request


@given(
    prompt=st.lists(st.integers(), min_size=1, max_size=6),
    output=st.lists(st.integers(), max_size=6),
    data=st.data(),
)
def test_any_range_of_tokens_reads_across_prompt_and_output(prompt, output, data):
    request = Request(
        request_id="a",
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(),
        max_total_tokens=99,
        output_token_ids=output,
    )
    start = data.draw(st.integers(0, request.num_tokens))
    stop = data.draw(st.integers(start, request.num_tokens))
    assert request.token_ids(start, stop) == tuple(prompt + output)[start:stop]
