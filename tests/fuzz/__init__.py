"""Damaged and hostile checkpoints: `PYTHONPATH=tests python -m fuzz --cases 10000`."""
