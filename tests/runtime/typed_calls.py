"""Calls as a user's script makes them, right and wrong: mypy reads this file, and nothing runs it."""

from collections.abc import Iterator
from typing import assert_type

import lamina
from lamina import CompileConfig, Runtime, SamplingParams, vllm

runtime = Runtime.from_pretrained("folder", dtype="bfloat16", max_model_len=1024, compile=CompileConfig())
assert_type(runtime, Runtime)
with Runtime.from_pretrained("folder", compile=False, numerics="exact", quantization="int8") as opened:
    assert_type(opened, Runtime)
Runtime.from_pretrained("folder", max_modle_len=1024)  # error: call-arg
Runtime.from_pretrained("folder", max_model_len="1024")  # error: arg-type
Runtime.from_pretrained("folder", numerics="slow")  # error: arg-type
Runtime.from_pretrained("folder", compile="yes")  # error: arg-type
Runtime.from_pretrained(17)  # error: arg-type
Runtime.from_pretrained("folder", None)  # error: call-arg
Runtime.from_pretrained()  # error: call-arg

params = SamplingParams(max_tokens=4, temperature=0, stop=["\n"], logit_bias={5: -1.0})
assert_type(params, SamplingParams)
SamplingParams(max_token=4)  # error: call-arg
SamplingParams(top_k=0.5)  # error: arg-type

assert_type(runtime.generate("one"), list[lamina.RequestOutput])
assert_type(runtime.generate([1, 2, 3], params), list[lamina.RequestOutput])
assert_type(runtime.generate(["one", "two"], params, priority=1), list[lamina.RequestOutput])
mixed: list[str | list[int]] = ["one", [1, 2]]
assert_type(runtime.generate(mixed, [params, params], timeout=0.5), list[lamina.RequestOutput])
assert_type(runtime.generate("one")[0].outputs[0].text, str)
runtime.generate("one", priorty=1)  # error: call-arg
runtime.generate("one", timeout="5")  # error: arg-type
runtime.generate("one", max_tokens=4)  # error: call-arg
runtime.generate(5)  # error: arg-type
runtime.generate("one", "params")  # error: arg-type

assert_type(runtime.stream("one", params, cache_salt="a"), Iterator[lamina.StreamDelta])
runtime.stream(["one", "two"])  # error: list-item list-item
runtime.stream("one", [params])  # error: arg-type
runtime.stream("one", cache_salt=5)  # error: arg-type

messages = [{"role": "user", "content": "Hello"}]
assert_type(runtime.chat(messages, params, priority=1), lamina.RequestOutput)
assert_type(runtime.stream_chat(messages, continue_final_message=True), Iterator[lamina.StreamDelta])
runtime.chat("Hello")  # error: arg-type
runtime.chat(messages, tool=[])  # error: call-arg
runtime.chat(messages, template_kwargs=["enable_thinking"])  # error: arg-type
runtime.stream_chat(messages, priority=None)  # error: arg-type

beams = lamina.BeamSearchParams(beam_width=2, max_tokens=4)
assert_type(runtime.beam_search(["one"], beams), list[lamina.RequestOutput])
runtime.beam_search("one", params)  # error: arg-type
runtime.beam_search("one", beams, priorities=1)  # error: call-arg

runtime.generates("one")  # error: attr-defined
lamina.Runtme()  # error: attr-defined

llm = vllm.LLM("folder", max_model_len=1024, gpu_memory_utilization=0.5, tensor_parallel_size=1)
drawn = vllm.SamplingParams(temperature=0.8, top_p=0.95, stop="\n")
assert_type(llm.generate("one", drawn), list[vllm.RequestOutput])
assert_type(llm.generate(["one", "two"], [drawn, drawn], priority=[0, 1]), list[vllm.RequestOutput])
assert_type(llm.generate({"prompt": "one", "cache_salt": "a"}), list[vllm.RequestOutput])
assert_type(llm.generate([vllm.TokensPrompt(prompt_token_ids=[1, 2])]), list[vllm.RequestOutput])
assert_type(llm.chat(messages), list[vllm.RequestOutput])
assert_type(llm.chat([messages, messages], drawn), list[vllm.RequestOutput])
vllm.LLM("folder", max_modle_len=1024)  # error: call-arg
vllm.LLM("folder", seed="0")  # error: arg-type
llm.generate("one", sampling_parameters=drawn)  # error: call-arg
llm.generate("one", params)  # error: arg-type
llm.generate(5)  # error: arg-type
llm.chat("Hello")  # error: arg-type
llm.embed("one")  # error: attr-defined
