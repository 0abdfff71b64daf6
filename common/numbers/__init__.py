"""Numbers that need no device and have the same bits everywhere: noise, sizes, RoPE tables, packing, timesteps,
tiles."""
