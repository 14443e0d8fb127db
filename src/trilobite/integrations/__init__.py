"""Plugins for the programs of others."""
