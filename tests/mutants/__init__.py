"""Mutants: kernels with one deliberate error each, and their verification.

python -m tests.mutants run            # breaks, compiles and verifies all of them on the GPU
python -m tests.mutants right          # samples right kernels: none may be refused
python -m tests.mutants table          # prints the tables of docs/proof.md
"""
