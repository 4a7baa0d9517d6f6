"""What is computed over stored bytes: checksums."""
