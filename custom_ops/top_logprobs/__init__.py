"""lamina::top_logprobs."""
