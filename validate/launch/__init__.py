"""Runs of real processes: started, watched, reported; launch files for clusters."""
