"""What is computed. A kernel file tells its algorithm from top to bottom; `parts/` tells the machine."""
