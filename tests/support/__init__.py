"""What test files share."""
