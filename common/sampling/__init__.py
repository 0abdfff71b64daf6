"""Arithmetic on noise levels: schedules and samplers, for which a model is a function."""
