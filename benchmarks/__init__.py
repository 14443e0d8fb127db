"""What Trilobite costs and how fast it is: scripts that print the tables of the documentation."""
