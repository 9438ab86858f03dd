"""The version of the distribution, kept in one place."""

VERSION = "0.1.0"
