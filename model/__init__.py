"""What is learned, and nothing else: no clock, no files, no environment, no network."""
