"""How fast the CPU engine and compression are, beside what the machine can do."""
