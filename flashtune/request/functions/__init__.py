"""Score and mask functions of a call: their captured values, their expressions, and lists of blocks."""
