"""Imports of the frameworks' own examples, judged by another reader than ours."""
