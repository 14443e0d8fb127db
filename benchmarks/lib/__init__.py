"""What the scripts share."""
