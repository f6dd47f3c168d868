"""Charts of `flashtune analyze` on the pages, and the measurements that they need."""
