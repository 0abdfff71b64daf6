"""The networks on MLX, one file each: native code whose attribute paths are checkpoint keys."""
