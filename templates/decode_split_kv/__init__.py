"""Decoding in Triton: keys are split among programs, and a second kernel combines the parts."""
