"""The machine's side of the kernels: GEMMs, softmax, masks, copies, epilogues and the tile schedule."""
