"""Records and helpers that every other package uses.

Problems, targets, configs, kernels, records, masks, layouts, errors and warnings. Imports no other package
of flashtune.
"""

# The version of flashtune, which the build reads from here.
VERSION = "0.1.0"
