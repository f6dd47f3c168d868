"""Gradients by one kernel in Triton; all programs add to dq in float32."""
