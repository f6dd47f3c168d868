"""Programs that use flashtune as users would."""
