"""Plain data between the engine and its workers, which another process could receive."""
