"""Makers of regions, a module for each page or subject; `documents.registry` names them."""
