"""Gradients by one Triton kernel whose programs all add to dq in float32."""
