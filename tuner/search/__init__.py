"""The search of one problem: proposals, pipeline, finals and selection, with a log that resumes it."""
