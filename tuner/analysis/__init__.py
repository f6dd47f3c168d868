"""`flashtune explain` and `flashtune doctor`, and the overview of a model's attention."""
