"""The original model run block by block on a text, for the Hessians of its matrices."""
