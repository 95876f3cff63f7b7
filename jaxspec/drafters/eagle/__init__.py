"""EAGLE-1, EAGLE-2, EAGLE-3 and P-EAGLE: a head of one layer (or a few) on the target's features."""
