"""The features of attention: a description of each, from which the other packages derive their lists."""
