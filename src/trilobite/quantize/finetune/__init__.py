"""Fine-tuning of what is not codes, block by block or of the whole model."""
