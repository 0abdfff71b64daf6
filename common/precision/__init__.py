"""The dtype in which each parameter is kept and computed, and its time in memory: policies, presets, chips, cards."""
