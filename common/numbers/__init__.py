"""Numbers with the same bits everywhere, without a device: noise, sizes, RoPE tables, packing, timesteps, tiles."""
