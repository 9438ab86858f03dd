"""A walk over the switches of proven best plans: what is turned, of which searches."""
