"""How codes are found: one matrix in, one packed weight out."""
