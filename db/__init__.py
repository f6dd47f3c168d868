"""Databases and tables of records: the store, the light reader and the tuned tables."""
