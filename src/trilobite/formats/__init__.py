"""What stored bytes mean: encode and decode, no optimisation."""
