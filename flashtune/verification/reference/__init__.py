"""The float64 reference of a forward pass, and the masks and scores that both passes share."""
