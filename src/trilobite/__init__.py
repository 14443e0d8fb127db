"""Trilobite makes Mixture-of-Experts language models small enough for the machine you have, and runs them there."""

__version__ = "0.1.0"
