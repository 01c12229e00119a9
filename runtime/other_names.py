"""What other libraries call our settings and parameters, and what to write in place of each name."""

from collections.abc import Iterable

NO_CODE = "Lamina never runs code of a checkpoint; leave it out"

# vLLM's, transformers' and llama.cpp's names for what a runtime is built with.
SETTINGS = {
    "gpu_memory_utilization": "it is memory_fraction here",
    "mem_fraction_static": "it is memory_fraction here",
    "enforce_eager": "it is compile=False here; compile=CompileConfig(cuda_graphs='off') keeps compiled code",
    "compilation_config": "it is compile=CompileConfig(...) here",
    "batch_invariant": "it is compile=CompileConfig(batch_invariant=True) here",
    "tensor_parallel_size": "it is tensor_parallel here",
    "distributed_executor_backend": "it is executor here",
    "pipeline_parallel_size": "it is pipeline_parallel here",
    "data_parallel_size": "it is data_parallel here, of AsyncRuntime and lamina serve",
    "device_map": "it is device='auto', 'cpu' or 'cuda' here",
    "torch_dtype": "it is dtype here",
    "load_in_8bit": "it is quantization='int8' here",
    "load_in_4bit": "it is quantization='w4a16' here",
    "kv_cache_quantization": "it is kv_cache_dtype='fp8' here",
    "max_seq_len": "it is max_model_len here",
    "max_context_len": "it is max_model_len here",
    "n_ctx": "it is max_model_len here",
    "n_threads": "set OMP_NUM_THREADS",
    "max_batch_size": "it is max_num_seqs here",
    "max_num_tokens": "it is max_num_batched_tokens here",
    "swap_space": "it is swap_bytes here, in bytes and not GiB",
    "num_gpu_blocks_override": "it is num_kv_blocks here",
    "kv_cache_memory_bytes": "it is num_kv_blocks here, in blocks and not bytes",
    "enable_prefix_caching": "it is prefix_cache here",
    "enable_chunked_prefill": "prefill is always chunked; prefill_chunk sets the size",
    "long_prefill_token_threshold": "it is prefill_chunk here",
    "attention_backend": "it is attention here",
    "attn_implementation": "it is attention here",
    "hf_token": "it is token here",
    "use_auth_token": "it is token here",
    "download_dir": "it is cache_dir here for what Lamina makes; HF_HOME moves what comes from a hub",
    "generation_config": "it is generation_defaults here: True takes the checkpoint's, False does not",
    "trust_remote_code": NO_CODE,
    "tokenizer_mode": "there is one mode; leave it out",
    "tokenizer_revision": "revision holds for the tokenizer too; tokenizer= takes another folder",
    "skip_tokenizer_init": "leave it out, and give token ids with SamplingParams(detokenize=False)",
    "disable_log_stats": "nothing is logged unasked; Runtime.stats() has the figures",
    "logits_processors": "they belong to SamplingParams",
    "speculative_config": "Lamina does not speculate; leave it out",
    "enable_lora": "it is lora=LoRAConfig(...) here, the room for adapters",
    "max_loras": "it is lora=LoRAConfig(max_loras=...) here",
    "max_lora_rank": "it is lora=LoRAConfig(max_lora_rank=...) here",
    "max_cpu_loras": "it is lora=LoRAConfig(max_held=...) here",
    "lora_modules": "load each by Runtime.load_adapter(name, path)",
    "cpu_offload_gb": "weights are not offloaded; leave it out, or use quantization or a smaller dtype",
    "sampling_params": "it belongs to generate(prompts, params)",
}

# Likewise for what a request is sampled with.
SAMPLING = {
    "max_new_tokens": "it is max_tokens here",
    "max_completion_tokens": "it is max_tokens here",
    "max_length": "it is max_tokens here, without the prompt",
    "n_predict": "it is max_tokens here",
    "min_new_tokens": "it is min_tokens here",
    "do_sample": "it is temperature=0 here for False, and a temperature above 0 for True",
    "num_return_sequences": "it is n here",
    "num_beams": "it is BeamSearchParams(beam_width=...) for Runtime.beam_search here",
    "beam_width": "it belongs to BeamSearchParams, for Runtime.beam_search",
    "use_beam_search": "it is Runtime.beam_search(prompts, BeamSearchParams(...)) here",
    "length_penalty": "it belongs to BeamSearchParams, for Runtime.beam_search",
    "early_stopping": "a beam search here stops when nothing better can come; leave it out",
    "repeat_penalty": "it is repetition_penalty here",
    "logits_processor": "it is logits_processors here",
    "stop_strings": "it is stop here",
    "stop_sequences": "it is stop here",
    "eos_token_id": "it is stop_token_ids here",
    "bad_words_ids": "it is bad_words here",
    "top_logprobs": "it is logprobs here",
    "output_kind": "Runtime.stream gives pieces and Runtime.generate whole answers; leave it out",
    "spaces_between_special_tokens": "there is no such choice; leave it out",
    "truncate_prompt_tokens": "prompts are not shortened; cut the token ids",
    "guided_decoding": "it is structured_outputs=StructuredOutputs(...) here",
    "response_format": "it is structured_outputs=StructuredOutputs(json=...) here",
    "logprob_token_ids": "ask for the likeliest with logprobs",
    "extra_args": "there is nothing that would read it; leave it out",
    "priority": "it is an option of generate(prompts, params, priority=...)",
    "timeout": "it is an option of generate(prompts, params, timeout=...)",
    "cache_salt": "it is an option of generate(prompts, params, cache_salt=...)",
    "adapter": "it is an option of generate(prompts, params, adapter=...)",
}


# And for what a beam search is given.
BEAMS = {
    "num_beams": "it is beam_width here",
    "n": "it is beam_width here: so many answers are given",
    "max_new_tokens": "it is max_tokens here",
    "temperature": "a beam search draws nothing; leave it out",
    "early_stopping": SAMPLING["early_stopping"],
    "include_stop_str_in_output": "a beam search looks for no stop strings; leave it out",
}


def beside_sampling(parameters: Iterable[str]) -> dict[str, str]:
    """Returns hints for sampling parameters that were given as options of a request."""
    ours = {
        name: f"{name} belongs to params=SamplingParams({name}=...), or BeamSearchParams"
        for name in parameters
    }
    return {
        **{name: f"it belongs to SamplingParams, where {text}" for name, text in SAMPLING.items()},
        **ours,
        "sampling_params": "it is params here",
        "use_tqdm": "no bar is drawn; leave it out",
        "lora_request": "it is adapter='name' here, after Runtime.load_adapter(name, path)",
        "lora_name": "it is adapter here",
        "prompt_token_ids": "give token ids in place of the text",
        "stream": "use Runtime.stream or Runtime.stream_chat",
    }
