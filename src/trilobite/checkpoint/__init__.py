"""Files on disk: read a checkpoint, name its tensors, write a packed one."""
