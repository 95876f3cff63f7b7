"""Files that come from strangers: read, checked and replaced with care."""
