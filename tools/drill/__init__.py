"""The parts of tools/fault_drill.py."""
