"""Where bytes live: one protocol, local paths by the kernel's own calls, the rest by fsspec."""
