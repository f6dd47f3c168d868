"""Migrations of the database's schema, run by `flashtune.db.migrate`."""
