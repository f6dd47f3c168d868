"""Gradients by one warp-specialized kernel in Gluon for sm_90."""
