"""Text from a loaded model: prompts, caches, conversations."""
