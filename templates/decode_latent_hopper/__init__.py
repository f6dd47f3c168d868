"""Decoding with latent keys (MLA) in Gluon for sm_90."""
