"""Regret of dispatch: the time of the selected kernel over that of the fastest."""
