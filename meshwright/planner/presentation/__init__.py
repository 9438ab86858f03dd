"""Presentation of results in Python: the documents, tables and pictures of the commands."""

from meshwright.planner.presentation.presenters import picture_kind, presenter_of

__all__ = ["picture_kind", "presenter_of"]
