"""Products through a low-rank adapter that only some rows take."""
