"""What two families share unchanged: macros, and the arithmetic of tiles."""
