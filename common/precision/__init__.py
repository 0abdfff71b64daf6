"""In which dtype each parameter is kept and computed, and when it is in memory: policies, presets, chips and cards."""
