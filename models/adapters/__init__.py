"""Low-rank adapters as PEFT writes them, and as the slots of a runtime hold them."""
