"""Training frameworks' own programs, each as one rank of a cluster that is not there."""
