"""Arguments and contexts of templates that families share."""
