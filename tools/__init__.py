"""Instruments for developers, which no user needs."""
