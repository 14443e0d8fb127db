"""Trilobite."""
