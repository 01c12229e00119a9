"""From a model's name to an engine that is ready: memory, threads, kernels, the warm manifest."""
