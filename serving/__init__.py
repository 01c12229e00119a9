"""`lamina serve`: an OpenAI-compatible server over an AsyncRuntime."""
