"""Live trainer state: saved beside the training, and read back on any topology."""
