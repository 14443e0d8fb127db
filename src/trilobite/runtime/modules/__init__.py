"""The modules that take the place of those of transformers."""
