"""The engine's only way to a device: an interface, and the executor that runs a worker in this process."""
