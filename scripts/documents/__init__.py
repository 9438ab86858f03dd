"""What README.md and docs/ show of the program, made by the program.

Three kinds of region are rewritten, everything else on a page is written by hand:

- a console session, a fenced block that begins with ``$ meshwright``: what the command prints;
- a made region, between ``<!-- made by: NAME -->`` and ``<!-- end -->``, a table on lines of
  its own or a few words inside a line: what the function NAME of `documents.registry` returns;
- a picture below docs/images: what a command of its page draws.

``scripts/refresh`` writes them and tests/test_documents_are_current.py compares them.

Left alone, since this machine cannot make them again:

- docs/cpu_steps.md: steps measured on a processor, beside predictions from its calibration;
- docs/validate.md: the two reports "printed on a machine of two busy cores" (fenced as text);
- docs/performance.md: where the time of a search goes, told from profiles;
- docs/accuracy.md: tables of fits (what was fitted, what a source left out gives), which are dated,
  and the discussion of single errors, whose numbers are those of its tables, rounded;
- published numbers, wherever they stand.
"""
