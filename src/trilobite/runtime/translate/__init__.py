"""Sentences into sentences: encoder-decoder models, beam search with batch pruning."""
