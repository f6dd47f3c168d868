"""The database's schemas as migrations, run from code (`flashtune.db.migrate`)."""
