"""Which region of each tensor each rank of a topology holds, and who stores it."""
