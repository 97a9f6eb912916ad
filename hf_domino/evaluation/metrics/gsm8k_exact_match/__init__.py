"""One metric, complete by itself."""
