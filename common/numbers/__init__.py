"""What needs no device and has the same bits everywhere: noise, sizes, RoPE tables, packing, timesteps, tiles."""
