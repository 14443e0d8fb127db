"""The run: from a checkpoint to a packed one, line by line of its plan."""
