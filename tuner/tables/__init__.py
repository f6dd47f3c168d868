"""Tables of tuned kernels: lookup, import, export, receipts, comparison, deletion."""
