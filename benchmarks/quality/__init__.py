"""What compression costs a model."""
