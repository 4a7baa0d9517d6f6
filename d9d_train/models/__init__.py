"""The architectures: plain modules whose names are the training names of `d9d_ckpt.models`."""
