"""lamina::all_reduce_add_rms_norm, a sum over ranks, the residual sum and its norm in one step."""
