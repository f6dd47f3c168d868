"""Expressions of score and mask functions: records, canonical form, derivatives, intervals, evaluation."""
