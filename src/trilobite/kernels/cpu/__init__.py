"""The CPU engine: the native library of csrc/, found, called and bound."""
