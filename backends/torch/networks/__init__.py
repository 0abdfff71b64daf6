"""The networks on torch, one file each: native code whose attribute paths are checkpoint keys."""
