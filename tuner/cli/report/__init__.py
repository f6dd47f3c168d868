"""Tables, panels and plots that commands print."""
