"""The forward pass as a warp-specialized kernel in Gluon for sm_90."""
