"""Fuzzed command lines and files, run through the command's own `main`."""
