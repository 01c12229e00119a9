"""What runs a step on the device: input batch, model runner, sampler."""
