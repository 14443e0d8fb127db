"""Run a packed checkpoint: modules, loading, generating."""
