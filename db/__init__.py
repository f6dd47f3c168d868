"""Databases and tables of records: the store that writes, the light reader, the tuned tables."""
