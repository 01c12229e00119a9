"""Who is admitted to the engine, and who is refused early."""
