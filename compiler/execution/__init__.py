"""Plans and how they run: CUDA graphs, the CPU call graph."""
