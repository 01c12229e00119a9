"""What the ops share: the registry, builds of native kernels, layouts."""
