"""Training of proposers: the data a target writes itself, students, losses, and the run that fits them."""
