"""Shapes and models: their texts, files, presets and Hugging Face configs."""
