"""Commands killed at random moments: who runs on, and what the same command then leaves."""
