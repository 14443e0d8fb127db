"""Commands that are killed with SIGKILL at random moments: they go on, and end with the bytes of a run let be."""
