"""Whether two backends compute the same: a criterion for each block, and passports that carry it between machines."""
