"""Checkpoints in object stores, by fsspec URL: s3://, gs://, hf://."""
