"""The steps of a run: schedules and guidance as data, predictions, the step cache, and masks."""
