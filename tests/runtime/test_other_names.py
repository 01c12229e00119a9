"""Names from other libraries, and misspelt ones, are refused with what to write in their place."""

import dataclasses
import inspect
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import BeamSearchParams, CompileConfig, Runtime, SamplingParams
from lamina.common.errors import ConfigError, RequestError
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.other_names import BEAMS, SAMPLING, SETTINGS
from lamina.runtime.request_options import RequestOptions

KINDS = {
    RuntimeConfig: (ConfigError, SETTINGS),
    CompileConfig: (ConfigError, {}),
    SamplingParams: (RequestError, SAMPLING),
    BeamSearchParams: (RequestError, BEAMS),
    RequestOptions: (RequestError, {}),
}


@pytest.mark.parametrize(
    "name, said",
    [
        ("gpu_memory_utilization", "memory_fraction"),
        ("enforce_eager", "compile=False"),
        ("tensor_parallel_size", "it is tensor_parallel here"),
        ("batch_invariant", "CompileConfig.batch_invariant=True"),
        ("enable_prefix_caching", "prefix_cache"),
        ("trust_remote_code", "never runs code of a checkpoint"),
        ("max_model_length", "did you mean 'max_model_len'"),
        ("gpu_memory_utilisation", "did you mean 'gpu_memory_utilization'.*memory_fraction"),
        ("max_tokens", "did you mean|wanted one of"),
        ("zzz", "wanted one of .*max_model_len"),
    ],
)
def test_an_unknown_setting_is_told_by_what_it_is_here(name, said):
    with pytest.raises(ConfigError, match=f"RuntimeConfig has no '{name}'; .*({said})"):
        Runtime.from_pretrained("anything", **{name: 1})


@pytest.mark.parametrize(
    "name, said",
    [
        ("max_new_tokens", "max_tokens"),
        ("do_sample", "temperature=0"),
        ("num_beams", "BeamSearchParams"),
        ("guided_decoding", "StructuredOutputs"),
        ("temprature", "did you mean 'temperature'"),
        ("topp", "did you mean 'top_p'"),
        ("use_tqdm", "wanted one of"),
    ],
)
def test_an_unknown_parameter_is_told_by_what_it_is_here(name, said):
    with pytest.raises(RequestError, match=f"SamplingParams has no '{name}'; .*({said})"):
        SamplingParams(**{name: 1})


@pytest.mark.parametrize(
    "name, said",
    [
        ("max_tokens", r"max_tokens belongs to params=SamplingParams\(max_tokens=...\)"),
        ("max_new_tokens", "SamplingParams, where it is max_tokens"),
        ("sampling_params", "it is params here"),
        ("use_tqdm", "leave it out"),
        ("priorty", "did you mean 'priority'"),
    ],
)
def test_parameters_beside_the_prompt_are_sent_where_they_belong(tiny_folder, name, said):
    with Runtime.from_pretrained(tiny_folder, compile=False) as runtime:
        for ask in (runtime.generate, runtime.stream, runtime.beam_search):
            with pytest.raises(RequestError, match=said):
                ask([1, 2], **{name: 5})


@pytest.mark.parametrize("model", ["some/model", 5, None, {"model": "m"}])
def test_a_runtime_of_anything_but_a_config_names_from_pretrained(model):
    with pytest.raises(ConfigError, match=r"wanted a RuntimeConfig, or Runtime.from_pretrained\(model"):
        Runtime(model)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_values_without_a_name_are_refused(kind):
    with pytest.raises(KINDS[kind][0], match=f"{kind.__name__} is given 0.7 without a name"):
        kind(0.7)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(name=st.text(min_size=1))
def test_any_unknown_name_is_one_error_of_ours_and_a_type_error(kind, name):
    if name in {field.name for field in dataclasses.fields(kind)}:
        return
    with pytest.raises(KINDS[kind][0]) as raised:
        kind(**{name: 1})
    assert isinstance(raised.value, TypeError)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_name_of_ours_is_told_to_be_anothers(kind):
    assert not KINDS[kind][1].keys() & {field.name for field in dataclasses.fields(kind)}


def test_editors_and_copies_see_the_dataclass():
    params = SamplingParams(temperature=0.5, stop=["x"])
    assert "temperature" in inspect.signature(SamplingParams).parameters
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, temperature=0.25).temperature == 0.25
