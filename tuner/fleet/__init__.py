"""Searches by workers on many hosts: the queue's jobs as requests, and the loop of a worker."""
