"""Work in processes: compilation, kernels on a GPU, timing.

Also the interfaces by which a search is replayed.
"""
