"""What compression cost: perplexity, KL divergence, tasks, expert use."""
