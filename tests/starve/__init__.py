"""Commands that lack room on the disk, a disk that works, memory or threads: one line, and they go on later."""
