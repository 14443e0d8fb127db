"""Where things lie, seen from the tests."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
SHARED = ROOT.parent / "shared"
"""Real checkpoints and texts; tests that read them skip where they are absent."""
