"""From wanted regions to byte copies, work units and tasks; pure, no I/O."""
