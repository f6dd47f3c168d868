"""Models of SRAM, traffic and time that families share."""
