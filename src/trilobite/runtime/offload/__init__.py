"""Models larger than memory: experts come from the disk when they are needed (arXiv:2312.17238)."""
