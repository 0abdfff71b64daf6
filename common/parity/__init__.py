"""Comparison of backends: a criterion for each block, and passports that carry recorded results between machines."""
