"""Host time of calls and of first uses."""
