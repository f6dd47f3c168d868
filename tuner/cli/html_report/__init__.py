"""`flashtune report`: stored kernels and searches as pages for a browser."""
