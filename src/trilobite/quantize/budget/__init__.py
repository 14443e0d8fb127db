"""A recipe that meets a budget of bytes: what each matrix gets, so that the whole loses least."""
