"""How much longer dispatch's choice takes than the fastest kernel."""
