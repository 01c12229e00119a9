"""Bodies of requests and answers, and what of them becomes a prompt and sampling parameters."""
