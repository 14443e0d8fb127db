"""The operators `linear` and `experts` for packed weights, and their backends."""
