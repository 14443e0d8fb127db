"""Offline: one matrix in, one packed weight out; plans and the compress loop."""
