"""What is to become of every tensor, before anything is quantized."""
