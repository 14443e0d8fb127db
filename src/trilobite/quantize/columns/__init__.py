"""Column scales that cost nothing: a vector moves from the matrices that read it to what writes it."""
