"""One step of decoding, recorded once and run again without the model's Python."""
