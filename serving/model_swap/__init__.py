"""Several models on one device: which of them is resident, and when another takes its place."""
