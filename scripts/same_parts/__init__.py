"""What ``scripts/same`` is made of: commands to run, inputs for them, and the code beside them."""
