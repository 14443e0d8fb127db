"""Architectures that transformers lacks, one file each; `register()` makes its Auto classes know them."""
