"""DFLASH and DSPARK: a block of tokens drafted in one pass."""
