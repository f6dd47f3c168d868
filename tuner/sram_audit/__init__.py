"""The SRAM model compared with the compiler."""
